"""The launch log, `launches.jsonl`: a line at each launch's start, and another if the launch ends by itself.

A launch without an end line was killed or is still running. A rewind also adds a line.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path

from reprise.storage import Json
from trainer.metrics.jsonl_file import JsonlFile

LAUNCHES = "launches.jsonl"


class LaunchOutcome(Enum):
    """How a launch ended. After `rewound`, another launch follows in the same process."""

    finished = "finished"
    stopped = "stopped"
    rewound = "rewound"
    failed = "failed"


class LaunchLog:
    """A launch's lines.

    Args:
        name: The launch's random name, repeated in the line of its first iteration in `metrics.jsonl`.
        clock: Returns the Unix time for each record.

    Raises:
        OSError: The run's folder cannot be written.
    """

    def __init__(self, folder: Path, name: str, clock: Callable[[], float]) -> None:
        self.name, self._clock = name, clock
        self._lines = JsonlFile(folder / LAUNCHES)

    def begin(self, iteration: int, began: float, description: Json) -> None:
        """Record the launch's start.

        Args:
            iteration: The last iteration before the launch.
            began: When the launch's processes started, in Unix time.
            description: The launch's topology, settings and environment.
        """
        self._add("begin", iteration, {"began": round(began, 3), **description})

    def rewound(self, iteration: int, members: Json) -> None:
        """Record a rewind to `iteration`, durably."""
        self._add("rewind", iteration, members)
        self._lines.sync()

    def end(self, iteration: int, outcome: LaunchOutcome, reason: str = "") -> None:
        """Record the launch's end, and close the file."""
        self._add("end", iteration, {"outcome": outcome.value, **({"reason": reason} if reason else {})})
        self._lines.close()

    def _add(self, event: str, iteration: int, members: Json) -> None:
        line = {"event": event, "launch": self.name, "iteration": iteration, **members}
        self._lines.add({**line, "time": self._clock()})
