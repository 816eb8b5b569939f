"""Import and export of checkpoints of Megatron-LM and Megatron-Core."""
