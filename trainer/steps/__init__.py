"""Finds the first differing tensor in two runs: records what they compute, and compares the records."""
