"""The file system under a checkpoint: calls, retries, locks, folders and threads."""
