"""The defaults of the commands that compare runs, without the libraries that they need."""

from __future__ import annotations

TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}  # absolute, of a loss, by dtype
# The first iterations after a start are slow: they fill caches, allocate memory and, where asked for, compile.
SKIPPED = 5
# How much slower a run may be, as a share of the first run's tokens per second: above what medians of equal runs differ
# by on a machine that nobody else uses, and below what makes a difference to a user.
THRESHOLD = 0.1
