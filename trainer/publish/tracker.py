"""The tracker interface, and the rows sent to a tracker.

To add a tracker, write a module with a `Tracker` and list it in `TRACKERS` in `trainer/config/logging.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from reprise.storage import Json
from trainer.config.logging import TRACKERS
from trainer.metrics.figures import figures_of
from trainer.metrics.json_lines import DECIMAL, value_of


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """A tracker's run for a branch.

    Args:
        id: Unique among all runs. 1 to 60 letters, digits and hyphens.
        name: The display name.
        config: Values by dotted key.
        folder: Where the tracker keeps files on this machine.
    """

    id: str
    name: str
    project: str
    config: Mapping[str, object]
    folder: Path


@dataclass(frozen=True, slots=True)
class TrackerRow:
    """A log line for a tracker.

    Args:
        number: The line's number in its branch, from 0. Identifies the line in the tracker.
        time: Unix time in seconds. For a line without a time, from an older version, the iteration in milliseconds.
        figures: Numbers by name, such as `train/loss`, including NaN and infinity.
        texts: Texts by name.
    """

    number: int
    iteration: int
    time: float
    figures: Mapping[str, float | int]
    texts: Mapping[str, str]


class Tracker(ABC):
    """A tracker with at most one open run. Creating it imports the tracker's library."""

    failures: tuple[type[Exception], ...] = (OSError,)  # exceptions raised when the tracker cannot take lines
    place = ""  # where the open run is, for people
    is_durable = True  # whether lines are stored once `send` returns, rather than `close`
    _run: Any = None  # the open run, in the library's form

    @abstractmethod
    def open(self, run: RemoteRun) -> None:
        """Open a run, and create it if needed. After a failure another run may still be open."""

    @abstractmethod
    def send(self, rows: Sequence[TrackerRow]) -> None:
        """Add lines. The first ones may already exist if an earlier process was killed."""

    @abstractmethod
    def close(self) -> None:
        """Send pending lines, and close the run."""


def load_tracker(name: str) -> Tracker:
    """Create the tracker listed in `TRACKERS` under `name`, which imports its library."""
    module, _, member = TRACKERS[name].rpartition(".")
    tracker: Tracker = getattr(import_module(module), member)()
    return tracker


def row_of(number: int, record: Json) -> TrackerRow:
    """Convert a `metrics.jsonl` record into a row."""
    time, kind = value_of(record, "time")
    seconds = time if kind == DECIMAL else record["iteration"] / 1e3
    return TrackerRow(number, record["iteration"], seconds, *figures_of(record))
