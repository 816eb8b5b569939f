"""The interface for a metric sink, such as a file or a service.

To add a sink, write a module with a `MetricSink` and list it in `SINKS` in `trainer/config/logging.py`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from reprise.storage import Files
from trainer.config.logging import SINKS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunPosition:
    """A run's position when its log opens, at the start or after a resume.

    Args:
        folder: The run's folder.
        files: The folder's store.
        iteration: The last iteration before. Lines for later iterations are abandoned.
        owes_evaluation: Whether the evaluation at `iteration` is still due or must be repeated.
        began_elsewhere: Whether earlier iterations may belong to another run, and so are not in this log.
        config: The resolved configuration in YAML.
    """

    folder: Path
    files: Files
    iteration: int
    owes_evaluation: bool = False
    began_elsewhere: bool = False
    config: str = ""


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """Metrics from an event: a training iteration, an evaluation, a sample or a save.

    Args:
        members: A `metrics.jsonl` line. Empty for an event without a line.
        curves: Points by tag, such as `train/loss`.
        texts: Texts by tag.
    """

    iteration: int
    members: Mapping[str, object] = field(default_factory=dict)
    curves: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


class MetricSink(ABC):
    """A metric output. Only rank 0 has sinks; it calls them from the training thread, except for `sync`.

    Import the sink's library in `start`, so that only runs with this sink need it.
    """

    @abstractmethod
    def start(self, position: RunPosition) -> None:
        """Open the output, and drop earlier launches' records for iterations after the position."""

    @abstractmethod
    def write(self, record: MetricRecord) -> None:
        """Write an event's metrics. Training waits, so a slow output should use its own thread."""

    def sync(self) -> None:  # noqa: B027
        """Make all records so far durable, because no checkpoint may be newer than its metrics.

        Saves call this from another thread, while training may write more records.
        """

    @abstractmethod
    def close(self) -> None:
        """Write pending records, and close the output."""


class GuardedSink(MetricSink):
    """Wraps a sink so its errors never end the run: logs the first exception and drops all others.

    If `start` fails, the sink is not called again. After any other exception it is, because the output may recover.
    """

    def __init__(self, name: str, sink: MetricSink) -> None:
        self._name = name
        self._sink = sink
        self._is_off = False
        self._has_failed = False

    def start(self, position: RunPosition) -> None:
        self._is_off = not self._attempt(lambda: self._sink.start(position))

    def write(self, record: MetricRecord) -> None:
        self._attempt(lambda: self._sink.write(record))

    def sync(self) -> None:
        self._attempt(self._sink.sync)

    def close(self) -> None:
        self._attempt(self._sink.close)
        self._is_off = True  # a save that ends later has nothing to sync

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Call the sink, and return whether it succeeded."""
        if self._is_off:
            return False
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever its library raises, training goes on
            if not self._has_failed:
                _log.error(
                    "Metrics could not be written to %s, and the run continues without them: %r", self._name, error
                )
            self._has_failed = True
            return False
        return True


def load_sink(name: str) -> MetricSink:
    """Create the sink listed in `SINKS` under `name`."""
    module, _, member = SINKS[name].rpartition(".")
    sink: MetricSink = getattr(import_module(module), member)()
    return sink
