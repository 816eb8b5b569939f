"""Lists, verifies, shows, compares, deletes and joins saved checkpoints, without a process group."""
