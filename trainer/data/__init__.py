"""Tokens from files to batches, in an order that is a function of seed and position."""
