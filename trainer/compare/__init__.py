"""Comparison of runs: loss curves and speed."""
