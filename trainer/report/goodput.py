"""Where the wall time of a run went since its first start: the parts add up to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy

from trainer.compare.text_table import duration
from trainer.metrics.log_file import Floats, MetricsLog
from trainer.report.history import (
    BLOCKED,
    DATA,
    SECONDS,
    TIME,
    History,
    LaunchSpan,
    events_of,
    sum_of,
    times_of,
)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds of a run by their use.

    Attributes:
        trained: iterations of the run, without their waits for data.
        repeated: iterations that were lost by a kill or given up by a rewind.
        data: waits of rank 0 for data.
        saves: blocked by saves, and waits for the last save of a launch.
        evaluated: evaluations.
        starting: from the start of processes to the first iteration.
        between: after the last line of a launch, until the next launch.
        other: the remainder, such as samples of text, checks and lines of the log.
    """

    trained: float
    repeated: float
    data: float
    saves: float
    evaluated: float
    starting: float
    between: float
    other: float

    @property
    def wall(self) -> float:
        """The seconds from the first start to the last line."""
        return float(sum(self.parts().values()))

    @property
    def share(self) -> float:
        """The share of the wall time that trained forward."""
        return self.trained / self.wall if self.wall > 0 else 0.0

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """Return the line of `reprise checkpoint ls`."""
        parts = {name: seconds / self.wall for name, seconds in self.parts().items() if name != "trained"}
        shares = [f"{PART_TEXTS[name]} {share:.1%}" for name, share in parts.items() if share >= _LEAST_SHARE]
        return f"goodput {self.share:.1%} of {duration(self.wall)}" + (f": {', '.join(shares)}" if shares else "")


PART_TEXTS = {
    "trained": "trained forward",
    "repeated": "repeated",
    "data": "waited for data",
    "saves": "blocked by saves",
    "evaluated": "evaluated",
    "starting": "started",
    "between": "between launches",
    "other": "other",
}
_LEAST_SHARE = 0.0005  # of a part in the line


def measure_goodput(history: History) -> Goodput | None:
    """Return where the time of a run went; None for a log without times or starts."""
    launches = history.launches
    if not launches:
        return None
    began, ended = launches[0].began, launches[-1].ended
    logs = history.logs
    data = _total(DATA, history.log)
    spent = {
        "trained": _total(SECONDS, history.log) - data,
        "repeated": _total(SECONDS, *history.abandoned),
        "data": data,
        "saves": _total(BLOCKED, *logs) + _last_saves(launches, logs),
        "evaluated": _evaluated(launches, logs),
        "starting": sum(launch.start_seconds for launch in launches),
        "between": sum(gap for _, gap in gaps(launches)),
    }
    wall = max(ended - began, 0.0)
    return Goodput(**spent, other=wall - sum(spent.values()))


def _total(quantity: str, *logs: MetricsLog) -> float:
    return float(sum(numpy.nansum(log.columns.column(quantity)) for log in logs))


def gaps(launches: tuple[LaunchSpan, ...]) -> Iterator[tuple[float, float]]:
    """Yield the end of each launch but the last, and the seconds until the next."""
    for launch, following in itertools.pairwise(launches):
        yield launch.ended, max(0.0, following.began - launch.ended)


def _evaluated(launches: Sequence[LaunchSpan], logs: Sequence[MetricsLog]) -> float:
    """Return the seconds of evaluations: each lasts from the line before, or from the start of its launch."""
    times = _sorted([times_of(log) for log in logs] + [numpy.array([_ready(launch) for launch in launches])])
    moments = _sorted([_times_of(logs, "evaluation")])
    before = times[numpy.maximum(numpy.searchsorted(times, moments) - 1, 0)]
    return float(numpy.maximum(moments - before, 0.0).sum())


def _last_saves(launches: Sequence[LaunchSpan], logs: Sequence[MetricsLog]) -> float:
    """Return the seconds from the last work of each launch to its end, where it saved meanwhile."""
    work = _sorted([*(log.columns.column(TIME) for log in logs), _times_of(logs, "evaluation", "sample")])
    saves = _sorted([_times_of(logs, "save", "local_save", "weights_save")])
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
