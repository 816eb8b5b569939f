"""The source of a run's start, and the state filled from it."""
