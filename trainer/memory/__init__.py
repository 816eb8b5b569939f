"""A run's memory needs, checked before it starts and shown by a dry run."""
