"""Checks a machine, a folder and hosts: whether a run can train and save there, and how fast."""
