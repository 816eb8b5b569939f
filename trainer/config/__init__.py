"""The configuration: its schema, which Hydra fills, and its checks."""
