"""Import of checkpoints from other programs, and export to them."""
