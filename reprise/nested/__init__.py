"""Nested state dicts: stored names, the ranks' agreement on tensor tables, and filling in place."""
