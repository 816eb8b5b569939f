"""Checkpoints of DeepSpeed at ZeRO stages 0 to 3, in."""
