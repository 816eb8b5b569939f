"""A run's clock for its records. It never goes back, also across hosts and launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from reprise.storage import file_system_time
from trainer.metrics.jsonl_file import last_recorded_time


def run_clock(
    folder: Path, names: tuple[str, ...], age_s: float, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a Unix-time clock for a launch's records, immune to changes of the host's clock.

    It starts at the file system's time, or after the last record by an earlier launch, whichever is later.

    Args:
        folder: The run's folder.
        names: The files with the records.
        age_s: Seconds since the launch began. Earlier launches' records predate it.
        clock: A monotonic clock in seconds.

    Raises:
        OSError: The folder cannot be written, or a record cannot be read.
    """
    last = max(last_recorded_time(folder / name) for name in names)
    offset = max(file_system_time(folder), last + age_s) - clock()
    return lambda: round(offset + clock(), 3)
