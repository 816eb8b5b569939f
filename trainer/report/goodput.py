"""Breaks down a run's wall time since its first start. The parts add up to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from trainer.compare.text_table import duration
from trainer.metrics.log_file import Floats, MetricsLog
from trainer.report.history import (
    BLOCKED,
    DATA,
    SAVES,
    SECONDS,
    TIME,
    History,
    LaunchSpan,
    events_of,
    sum_of,
    times_of,
)

_TRAINED = "trained forward"
_LEAST_SHARE = 0.0005  # the smallest share listed in the summary line


@dataclass(frozen=True, slots=True)
class Goodput:
    """A run's seconds by use.

    Attributes:
        parts: Seconds by name. The first part is forward training; the last is the remainder, such as sampling and
            checks.
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

    def __str__(self) -> str:
        """Return the summary line for `reprise checkpoint ls`."""
        parts = {name: seconds / self.wall for name, seconds in self.parts.items() if name != _TRAINED}
        shares = [f"{name} {share:.1%}" for name, share in parts.items() if share >= _LEAST_SHARE]
        return f"goodput {self.share:.1%} of {duration(self.wall)}" + (f": {', '.join(shares)}" if shares else "")


def measure_goodput(history: History) -> Goodput | None:
    """Return the breakdown of a run's wall time, or None for a log without times or starts."""
    launches, logs = history.launches, history.logs
    if not launches:
        return None
    data = _total(DATA, history.log)
    parts = {
        _TRAINED: _total(SECONDS, history.log) - data,
        "repeated": _total(SECONDS, *history.abandoned),  # iterations lost to a kill or rewind
        "waited for data": data,  # on rank 0
        "blocked by saves": _total(BLOCKED, *logs) + _last_saves(launches, logs),
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
    times = _sorted([times_of(log) for log in logs] + [numpy.array([_ready(launch) for launch in launches])])
    moments = _sorted([_times_of(logs, "evaluation")])
    before = times[numpy.maximum(numpy.searchsorted(times, moments) - 1, 0)]
    return float(numpy.maximum(moments - before, 0.0).sum())


def _last_saves(launches: Sequence[LaunchSpan], logs: Sequence[MetricsLog]) -> float:
    """Return the seconds between each launch's last work and its end, if a save was logged in between."""
    work = _sorted([*(log.columns.column(TIME) for log in logs), _times_of(logs, "evaluation", "sample")])
    saves = _sorted([_times_of(logs, *SAVES)])
    seconds = 0.0
    for launch in launches:
        place = int(numpy.searchsorted(work, launch.ended, side="right"))
        last = max(_ready(launch), float(work[place - 1]) if place else 0.0)
        if numpy.searchsorted(saves, last) < numpy.searchsorted(saves, launch.ended, side="right"):
            seconds += max(0.0, launch.ended - last)
    return seconds


def _ready(launch: LaunchSpan) -> float:
    """Return when a launch finished starting up."""
    return launch.began + launch.start_seconds


def _times_of(logs: Sequence[MetricsLog], *names: str) -> Floats:
    times = (sum_of(event, "time") for event in events_of(logs, *names))
    return numpy.array([time for time in times if time])


def _sorted(times: Sequence[Floats]) -> Floats:
    joined = numpy.concatenate(times)
    return numpy.sort(joined[numpy.isfinite(joined)])
