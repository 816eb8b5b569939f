"""Where the wall time of a run went since its first start: the parts add up to it."""

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
_LEAST_SHARE = 0.0005  # of a part in the line


@dataclass(frozen=True, slots=True)
class Goodput:
    """The seconds of a run by their use.

    Attributes:
        parts: of the first, the run trained forward; the last is the remainder, such as samples of text and checks.
    """

    parts: dict[str, float]

    @property
    def wall(self) -> float:
        """The seconds from the first start to the last line."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """The share of the wall time that trained forward."""
        return self.parts[_TRAINED] / self.wall if self.wall > 0 else 0.0

    def __str__(self) -> str:
        """Return the line of `reprise checkpoint ls`."""
        parts = {name: seconds / self.wall for name, seconds in self.parts.items() if name != _TRAINED}
        shares = [f"{name} {share:.1%}" for name, share in parts.items() if share >= _LEAST_SHARE]
        return f"goodput {self.share:.1%} of {duration(self.wall)}" + (f": {', '.join(shares)}" if shares else "")


def measure_goodput(history: History) -> Goodput | None:
    """Return where the time of a run went; None for a log without times or starts."""
    launches, logs = history.launches, history.logs
    if not launches:
        return None
    data = _total(DATA, history.log)
    parts = {
        _TRAINED: _total(SECONDS, history.log) - data,
        "repeated": _total(SECONDS, *history.abandoned),  # iterations that a kill took, or a rewind
        "waited for data": data,  # of rank 0
        "blocked by saves": _total(BLOCKED, *logs) + _last_saves(launches, logs),
        "evaluated": _evaluated(launches, logs),
        "started": sum(launch.start_seconds for launch in launches),  # from the start of processes to an iteration
        "between launches": sum(max(0.0, b.began - a.ended) for a, b in itertools.pairwise(launches)),
    }
    wall = max(launches[-1].ended - launches[0].began, 0.0)
    return Goodput(parts | {"other": wall - sum(parts.values())})


def _total(quantity: str, *logs: MetricsLog) -> float:
    return float(sum(numpy.nansum(log.columns.column(quantity)) for log in logs))


def _evaluated(launches: Sequence[LaunchSpan], logs: Sequence[MetricsLog]) -> float:
    """Return the seconds of evaluations: each lasts from the line before, or from the start of its launch."""
    times = _sorted([times_of(log) for log in logs] + [numpy.array([_ready(launch) for launch in launches])])
    moments = _sorted([_times_of(logs, "evaluation")])
    before = times[numpy.maximum(numpy.searchsorted(times, moments) - 1, 0)]
    return float(numpy.maximum(moments - before, 0.0).sum())


def _last_saves(launches: Sequence[LaunchSpan], logs: Sequence[MetricsLog]) -> float:
    """Return the seconds from the last work of each launch to its end, where it saved meanwhile."""
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
    """Return the time of the end of a start."""
    return launch.began + launch.start_seconds


def _times_of(logs: Sequence[MetricsLog], *names: str) -> Floats:
    times = (sum_of(event, "time") for event in events_of(logs, *names))
    return numpy.array([time for time in times if time])


def _sorted(times: Sequence[Floats]) -> Floats:
    joined = numpy.concatenate(times)
    return numpy.sort(joined[numpy.isfinite(joined)])
