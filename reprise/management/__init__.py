"""Saved checkpoints are listed, verified, shown, compared, deleted and joined, without a process group."""
