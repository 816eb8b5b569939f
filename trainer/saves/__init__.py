"""The folders where a run saves, and the mirror of its checkpoints."""
