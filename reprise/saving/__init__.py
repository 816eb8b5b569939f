"""Saving: plan, snapshot, write, commit."""
