"""Loading: choose, open, read, verify."""
