"""The interface of an output of metrics, such as a file or a service.

Another output is a module with a `MetricSink`, and its line in `SINKS` of `trainer/config/logging.py`.
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
    """The place of a run where its log begins, and goes on after a resume.

    Args:
        folder: the run's.
        files: the store of the folder.
        iteration: the last iteration before; lines of later iterations are abandoned.
        owes_evaluation: whether the evaluation of `iteration` is still due, or has to be repeated.
        began_elsewhere: whether the iterations so far may be those of another run, which are not in this log.
        config: the resolved configuration in YAML.
    """

    folder: Path
    files: Files
    iteration: int
    owes_evaluation: bool = False
    began_elsewhere: bool = False
    config: str = ""


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """The metrics of an event of a run: an iteration of training, an evaluation, a sample or a save.

    Args:
        members: a line of `metrics.jsonl`; empty for an event without a line.
        curves: points by the tags of their curves, such as `train/loss`.
        texts: texts by their tags.
    """

    iteration: int
    members: Mapping[str, object] = field(default_factory=dict)
    curves: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


class MetricSink(ABC):
    """An output of metrics. Rank 0 alone has sinks, and calls them, but for `sync`, from the training thread.

    Its library is imported in `start`, and is needed by runs with the sink alone.
    """

    @abstractmethod
    def start(self, position: RunPosition) -> None:
        """Open the output, and drop records of earlier launches of iterations after the position."""

    @abstractmethod
    def write(self, record: MetricRecord) -> None:
        """Add the metrics of an event. Training waits, so a slow output needs a thread of its own."""

    def sync(self) -> None:  # noqa: B027
        """Make durable the records so far. A checkpoint must not be newer than the metrics before it.

        A save calls it on a thread of its own, while training may write further records.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what waits, and close the output."""


class GuardedSink(MetricSink):
    """A sink without the power to end a run: its first exception is logged, all others are dropped.

    After an exception in `start` the sink is not called again; after any other it is, as its output may recover.
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
        """Return whether a call of the sink succeeds."""
        if self._is_off:
            return False
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever its library raises, training goes on
            if not self._has_failed:
                _log.error("The metrics lack points in %s, and the run goes on without: %r", self._name, error)
            self._has_failed = True
            return False
        return True


def load_sink(name: str) -> MetricSink:
    """Return a new sink of the table `SINKS`."""
    module, _, member = SINKS[name].rpartition(".")
    sink: MetricSink = getattr(import_module(module), member)()
    return sink
