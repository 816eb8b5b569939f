"""The seconds from the launch of a run to its first iteration, by phase. Imports no torch."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

_START_TICKS = 19  # the number of `starttime` after the name of the command in /proc/PID/stat, see proc(5)


class Phase(Enum):
    """A part of a start, in order."""

    torchrun = "torchrun"
    imports = "imports"
    rendezvous = "rendezvous"
    data = "data"
    build = "build"
    load = "load"


def since_boot() -> float:
    """Return the seconds since the host was booted, the clock of the start times of processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started_at(pid: int, *, proc: Path = Path("/proc")) -> float | None:
    """Return the time at which a process of this host started, by `since_boot`; None if /proc does not show it."""
    try:
        # The name of the command is in parentheses and may hold any character.
        numbers = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(numbers[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


@contextmanager
def importing() -> Iterator[None]:
    """Suspend garbage collection while modules are imported, and exempt them from later collections.

    Modules are no garbage, and to look for it takes a tenth of the import of torch.
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
    """Divides the time since the start of this process among the phases of a start.

    Args:
        began: when this process started, by `clock`; None begins now.
        clock: a clock in seconds.
    """

    def __init__(self, began: float | None = None, *, clock: Callable[[], float] = since_boot) -> None:
        self._clock = clock
        self._last = clock() if began is None else began
        self._began = self._last
        self._seconds = dict.fromkeys(Phase, 0.0)

    @staticmethod
    def of_process() -> StartTimes:
        """Return the times of this process, which count from its start."""
        return StartTimes(started_at(os.getpid()))

    def end(self, phase: Phase) -> None:
        """Count the time since the end of the last phase as part of `phase`, which may come several times."""
        now = self._clock()
        self._seconds[phase] += max(0.0, now - self._last)
        self._last = now

    def add_torchrun(self) -> None:
        """Count the time from the start of torchrun, the parent of this process, to the start of this process."""
        launcher, process = started_at(os.getppid()), started_at(os.getpid())
        if launcher is not None and process is not None:
            self._seconds[Phase.torchrun] = max(0.0, process - launcher)

    def age_s(self) -> float:
        """Return the seconds since the launch, torchrun's start included."""
        return self._clock() - self._began + self._seconds[Phase.torchrun]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all phases as `seconds`, then those of each; torchrun's only if it started the run."""
        phases = {p.value: s for p, s in self._seconds.items() if s or p is not Phase.torchrun}
        return {"seconds": sum(phases.values()), **phases}

    def __str__(self) -> str:
        """Return the line of the log."""
        total, *phases = self.seconds().items()
        return f"started in {total[1]:.1f} s: " + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases)
