"""Local checkpoints: one folder on each host, copies on its neighbors, and loads that take each range where it lies."""
