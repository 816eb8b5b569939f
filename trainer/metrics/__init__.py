"""Run metrics: log lines, `metrics.jsonl`, TensorBoard files and the progress bar."""
