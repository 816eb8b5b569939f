"""The memory that a run needs, checked before it starts and shown by a dry run."""
