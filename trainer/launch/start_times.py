"""Seconds from a run's launch to its first iteration, by phase. Imports no torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("imports", "rendezvous", "data", "build", "load")  # in order


@contextmanager
def importing() -> Iterator[None]:
    """Suspend garbage collection during imports, and exempt the imported modules from later collections.

    Modules are not garbage, and scanning them takes a tenth of torch's import time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


class StartTimes:
    """Divides the time from now on among the startup phases."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def end(self, phase: str) -> None:
        """Add the time since the previous phase's end to `phase`. A phase may end several times."""
        now = time.monotonic()
        self._seconds[phase] += max(0.0, now - self._last)
        self._last = now

    def age_s(self) -> float:
        """Return the seconds since the launch."""
        return time.monotonic() - self._began

    def seconds(self) -> dict[str, float]:
        """Return the total as `seconds`, then each phase's seconds."""
        return {"seconds": sum(self._seconds.values()), **self._seconds}

    def __str__(self) -> str:
        """Return the log line."""
        total, *phases = self.seconds().items()
        return f"started in {total[1]:.1f} s: " + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases)
