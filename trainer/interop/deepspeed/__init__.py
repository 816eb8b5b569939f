"""Import of DeepSpeed checkpoints at ZeRO stages 0 to 3."""
