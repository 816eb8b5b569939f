"""Nested state dicts: stored names, the tables that ranks agree on, and filling in place."""
