"""Tokens from files to batches, in an order computed from seed and position."""
