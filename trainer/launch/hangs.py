"""Facts about a hung rank: its activity, and its threads' stacks."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path

FOLDER = "hangs"  # in the run's folder


class Activity:
    """What a rank's main thread is doing. Only the main thread sets it. Any thread may read it."""

    def __init__(self) -> None:
        self._text = ("the start", 0)

    def begin(self, noun: str, iteration: int) -> None:
        """Note an activity, such as `the step`, and its iteration. Costs no more than an assignment."""
        self._text = (noun, iteration)

    def __str__(self) -> str:
        """Return the activity as `the step of iteration 12`."""
        noun, iteration = self._text
        return f"{noun} of iteration {iteration}" if iteration else noun


def write_stacks(folder: Path, rank: int, reason: str) -> Path | None:
    """Write the stacks of all threads in this process.

    Args:
        folder: The folder for the files, created if needed.
        reason: Why the rank ends.

    Returns:
        The stack file, or None if it cannot be written.
    """
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.rank{rank}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(f"rank {rank}: {reason}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError:
        return None
    return path
