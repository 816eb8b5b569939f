"""Local checkpoints: a folder on each host, copies on its neighbors, and loads of each range from where it lies."""
