"""Imports and exports Megatron-LM and Megatron-Core checkpoints."""
