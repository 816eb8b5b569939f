"""Doors into the loops of other programs. The library imports none of them, and each imports its program alone."""
