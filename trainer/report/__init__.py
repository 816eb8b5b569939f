"""Reports on runs: a self-contained page, and a breakdown of each run's wall time."""
