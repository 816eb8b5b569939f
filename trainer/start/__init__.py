"""A start's source, and the state filled from it."""
