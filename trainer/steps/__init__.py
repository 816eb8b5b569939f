"""Finds the first tensor in which two runs differ: records of what they compute, and the comparison of two."""
