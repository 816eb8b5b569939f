"""What `scripts/faults/soak_power.py` is made of: a disk whose writes and flushes are logged, its replay, its jobs."""
