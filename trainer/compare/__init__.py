"""Compares runs: loss curves and speed."""
