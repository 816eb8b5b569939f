"""The clock of a run's records: one for all hosts and launches, which never goes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reprise.storage import file_system_time
from trainer.launch.start_times import since_boot
from trainer.metrics.jsonl_file import last_recorded_time


def run_clock(
    folder: Path, names: tuple[str, ...], age_s: float, *, clock: Callable[[], float] = since_boot
) -> Callable[[], float]:
    """Return a clock in Unix time for the records of a launch, unmoved where somebody sets the host's clock.

    It starts from the file system's clock, or from the last record of an earlier launch where that is later.

    Args:
        folder: the folder of the run.
        names: the files with the records.
        age_s: seconds since the launch began, which the records of earlier launches precede.
        clock: a clock in seconds.

    Raises:
        OSError: if the folder cannot be written or a record cannot be read.
    """
    last = max(last_recorded_time(folder / name) for name in names)
    offset = max(file_system_time(folder), last + age_s) - clock()
    return lambda: round(offset + clock(), 3)
