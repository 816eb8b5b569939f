"""Runs a command on every checkpoint while the run trains."""
