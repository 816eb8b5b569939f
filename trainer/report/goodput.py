"""Breaks down a run's wall time since its first start. The parts add up to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from trainer.metrics.json_lines import time_of
from trainer.metrics.log_file import MetricsLog
from trainer.report.history import (
    BLOCKED,
    DATA,
    SECONDS,
    History,
    LaunchSpan,
    events_of,
    times_of,
)

_TRAINED = "trained forward"


@dataclass(frozen=True, slots=True)
class Goodput:
    """A run's seconds by use.

    Attributes:
        parts: Seconds by name. The first part is forward training; the last is the remainder, such as sampling, checks
            and a launch's last save.
    """

    parts: dict[str, float]

    @property
    def wall(self) -> float:
        """Seconds from the first start to the last line."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """The share of wall time spent training forward."""
        return self.parts[_TRAINED] / self.wall if self.wall > 0 else 0.0


def measure_goodput(history: History) -> Goodput | None:
    """Return the breakdown of a run's wall time, or None for a run without recorded launches."""
    launches, logs = history.launches, history.logs
    if not launches:
        return None
    data = _total(DATA, history.log)
    parts = {
        _TRAINED: _total(SECONDS, history.log) - data,
        "repeated": _total(SECONDS, *history.abandoned),  # iterations lost to a kill or rewind
        "waited for data": data,  # on rank 0
        "blocked by saves": _total(BLOCKED, *logs),
        "evaluated": _evaluated(launches, logs),
        "started": sum(launch.start_seconds for launch in launches),  # from process start to the first iteration
        "between launches": sum(max(0.0, b.began - a.ended) for a, b in itertools.pairwise(launches)),
    }
    wall = max(launches[-1].ended - launches[0].began, 0.0)
    return Goodput(parts | {"other": wall - sum(parts.values())})


def _total(quantity: str, *logs: MetricsLog) -> float:
    return float(sum(numpy.nansum(log.columns.column(quantity)) for log in logs))


def _evaluated(launches: Sequence[LaunchSpan], logs: Sequence[MetricsLog]) -> float:
    """Return the evaluation seconds. Each evaluation lasts from the previous line or its launch's startup."""
    ready = [launch.began + launch.start_seconds for launch in launches]
    times = numpy.sort(numpy.concatenate([times_of(logs), ready]))
    moments = numpy.array([time_of(event) or 0.0 for event in events_of(logs, "evaluation")])
    before = times[numpy.maximum(times.searchsorted(moments) - 1, 0)]
    return float(numpy.maximum(moments - before, 0.0).sum())
