"""Parallelism, applied to a single-device model from outside, with a module per axis."""
