"""Run metrics: log lines, `metrics.jsonl` and TensorBoard files."""
