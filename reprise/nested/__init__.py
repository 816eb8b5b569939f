"""Nested state dicts: stored names, the tables agreed on by ranks, and filling in place."""
