"""Parts of `scripts/faults/soak_power.py`: a disk whose writes and flushes are logged, its replay, its jobs."""
