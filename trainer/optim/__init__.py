"""The optimizers, and sums that are exact in any order."""
