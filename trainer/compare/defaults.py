"""Defaults for the comparison commands, in a module that imports no heavy library."""

from __future__ import annotations

TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}  # absolute loss tolerances by dtype
# The first iterations after a start are slow: they fill caches, allocate memory and may compile.
SKIPPED = 5
# How much slower a run may be, as a share of the first run's tokens per second. It is more than the medians of equal
# runs differ on a quiet machine, and too little for a user to care about.
THRESHOLD = 0.1
