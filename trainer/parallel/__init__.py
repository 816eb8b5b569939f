"""Parallelism, applied to a single-device model from outside: one module per axis."""
