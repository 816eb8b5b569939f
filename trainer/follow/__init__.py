"""Runs a command on every checkpoint of a run, while it trains."""
