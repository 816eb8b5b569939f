"""Metrics of a run: log lines, metrics.jsonl, TensorBoard files, and the progress bar."""
