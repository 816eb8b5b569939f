"""The record of launches, `launches.jsonl`: a line when a launch of a run begins, and one when it ends by itself.

A launch without the second line was killed, or is running. A rewind has a line too, until a checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path

from reprise.storage import Json
from trainer.metrics.jsonl_file import JsonlFile

LAUNCHES = "launches.jsonl"


class LaunchOutcome(Enum):
    """How a launch ended; one that is rewound is followed by another in the same process."""

    finished = "finished"
    stopped = "stopped"
    rewound = "rewound"
    failed = "failed"


class LaunchLog:
    """The lines of one launch.

    Args:
        name: a random name of the launch, also in the line of its first iteration in `metrics.jsonl`.
        clock: the clock of the run's records.

    Raises:
        OSError: if the run's folder cannot be written.
    """

    def __init__(self, folder: Path, name: str, clock: Callable[[], float]) -> None:
        self.name, self._clock = name, clock
        self._lines = JsonlFile(folder / LAUNCHES)

    def begin(self, iteration: int, began: float, description: Json) -> None:
        """Record the begin.

        Args:
            iteration: the last iteration before.
            began: when the processes of the launch started, in Unix time.
            description: its topology, settings and environment.
        """
        self._add("begin", iteration, {"began": round(began, 3), **description})

    def rewound(self, iteration: int, members: Json) -> None:
        """Record a rewind to an iteration, durably."""
        self._add("rewind", iteration, members)
        self._lines.sync()

    def end(self, iteration: int, outcome: LaunchOutcome, reason: str = "") -> None:
        """Record the end, and close the file."""
        self._add("end", iteration, {"outcome": outcome.value, **({"reason": reason} if reason else {})})
        self._lines.close()

    def _add(self, event: str, iteration: int, members: Json) -> None:
        line = {"event": event, "launch": self.name, "iteration": iteration, **members}
        self._lines.add({**line, "time": self._clock()})
