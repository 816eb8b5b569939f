"""The loop of a run, its step and its evaluation."""
