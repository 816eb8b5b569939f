"""The folders that a run saves into, and the mirror of its checkpoints."""
