"""The interface of a tracker, and what is sent to it.

Another tracker is a module with a `Tracker`, and its line in `TRACKERS` of `trainer/config/logging.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from reprise.errors import ConfigError
from reprise.storage import Json
from trainer.config.logging import TRACKERS
from trainer.metrics.json_lines import DECIMAL, EXACT, value_of

# The first part of a figure's name, by the event of its line, and the names that the other outputs use.
_GROUPS = {"": "train", "evaluation": "valid"}
_NAMES = {"valid/valid_loss": "valid/loss", "train/checkpoint_seconds": "checkpoint/blocked_seconds"}
_HEX = "_hex"


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """The run of a tracker for one branch of a run.

    Args:
        id: unique among all runs; 1 to 60 letters, digits and hyphens.
        name: for people.
        config: dotted keys and values.
        folder: for files that the tracker keeps on this machine.
    """

    id: str
    name: str
    project: str
    config: Mapping[str, object]
    folder: Path


@dataclass(frozen=True, slots=True)
class TrackerRow:
    """A line for a tracker.

    Args:
        number: of the line in its branch, from 0: its key in the tracker.
        time: seconds since 1970. A line without a time, of an earlier version, has its iteration as milliseconds.
        figures: numbers by name, such as `train/loss`; NaN and infinity are among them.
        texts: texts by name, such as `sample`.
    """

    number: int
    iteration: int
    time: float
    figures: Mapping[str, float | int]
    texts: Mapping[str, str]


class Tracker(ABC):
    """A tracker, with one of its runs open at a time. Its library is imported when an object is made."""

    failures: tuple[type[Exception], ...] = (OSError,)  # what its library raises where a tracker cannot be reached
    refusals: tuple[type[Exception], ...] = ()  # those of them that only a user can mend
    place = ""  # of the open run, for people
    is_durable = True  # whether it has the lines when `send` returns; else when `close` does

    def is_refusal(self, error: Exception) -> bool:
        """Return whether a failure is one that only a user can mend, by its class or the status of HTTP."""
        status = self.http_status(error)
        is_busy = status in (408, 429)
        return isinstance(error, self.refusals) or (400 <= status < 500 and not is_busy)

    def http_status(self, error: Exception) -> int:
        """Return the status in the answer of a server, 0 without one."""
        return int(getattr(getattr(error, "response", None), "status_code", 0))

    @abstractmethod
    def open(self, run: RemoteRun) -> None:
        """Open a run, which is created if needed. One may be open already, after a failure."""

    @abstractmethod
    def send(self, rows: Sequence[TrackerRow]) -> None:
        """Add lines, of which the first may be there already if a process was killed before."""

    @abstractmethod
    def close(self) -> None:
        """Send what waits, and close the run."""


def load_tracker(name: str) -> Tracker:
    """Return a tracker of the table `TRACKERS`.

    Raises:
        ConfigError: if its library is not installed.
    """
    module, _, member = TRACKERS[name].rpartition(".")
    try:
        tracker: Tracker = getattr(import_module(module), member)()
    except ImportError as error:
        fix = f"pip install 'torch-reprise[{name}]'"
        raise ConfigError(f"The tracker {name} cannot be imported", found=error, fix=fix) from error
    return tracker


def row_of(number: int, members: Json) -> TrackerRow:
    """Return the row of a record of `metrics.jsonl`."""
    group = str(members.get("event", ""))
    group = _GROUPS.get(group, group)
    figures, texts = dict[str, float | int](), dict[str, str]()
    for name, value in members.items():
        label = f"{group}/{name}"
        label = _NAMES.get(label, label)
        if name in ("iteration", "event", "time") or name.endswith(_HEX):
            continue
        figure, kind = value_of(members, name)
        if kind in (DECIMAL, EXACT):
            figures[label] = value if type(value) is int and f"{name}{_HEX}" not in members else figure
        elif isinstance(value, bool):
            figures[label] = int(value)
        elif isinstance(value, str):
            texts[group if name == "text" else label] = value
        elif name == "start" and isinstance(value, dict):
            phases = {phase: value_of(value, phase) for phase in value}
            figures |= {f"start/{phase}": seconds for phase, (seconds, kind) in phases.items() if kind == DECIMAL}
    time, kind = value_of(members, "time")
    return TrackerRow(
        number, members["iteration"], time if kind == DECIMAL else members["iteration"] / 1e3, figures, texts
    )
