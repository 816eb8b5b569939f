"""The report of runs: a self-contained page, and where the time of a run went."""
