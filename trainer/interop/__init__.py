"""Imports other programs' checkpoints, and exports to them."""
