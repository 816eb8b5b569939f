"""Loading: choose, open, read and verify."""
