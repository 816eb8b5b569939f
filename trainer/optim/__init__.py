"""The optimizers, and exact sums in any order."""
