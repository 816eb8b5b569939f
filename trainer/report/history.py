"""Reads all that the folder of a run records of it: iterations as columns, events, and the launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy
from numpy.typing import NDArray

from reprise.errors import DataError
from reprise.storage import Json, exists, is_dir, matching
from trainer.compare.points import Reading
from trainer.compare.read import METRICS_FILE
from trainer.metrics.json_lines import LATEST, read_records
from trainer.metrics.launch_log import LAUNCHES
from trainer.metrics.log_file import read_log

_LARGEST = 1e300  # a number of a record, whose sums are finite
Floats = NDArray[numpy.float64]


class LogColumns(NamedTuple):
    """The iterations of a log, a value each, in the order of their lines; NaN for a value without a record.

    Attributes:
        blocked: seconds during which a save blocked training.
        data: seconds of the wait for data.
        time: the end of the iteration, in Unix time.
    """

    iteration: Floats
    loss: Floats
    grad_norm: Floats
    lr: Floats
    samples: Floats
    speed: Floats
    seconds: Floats
    blocked: Floats
    data: Floats
    time: Floats

    def where(self, mask: NDArray[numpy.bool_]) -> LogColumns:
        """Return the iterations under a mask."""
        return LogColumns(*(column[mask] for column in self))


_KEYS = (
    "loss",
    "grad_norm",
    "lr",
    "consumed_samples",
    "tokens_per_second",
    "seconds",
    "checkpoint_seconds",
    "data_seconds",
    "time",
)


@dataclass(frozen=True, slots=True)
class Log:
    """The lines of a `metrics.jsonl`, or of a branch that was abandoned.

    Attributes:
        events: records of evaluations, saves and samples.
        starts: records of the first iteration after each start.
        evaluations: the validation losses by iteration.
    """

    columns: LogColumns
    events: tuple[Json, ...]
    starts: tuple[Json, ...]
    evaluations: dict[int, Reading]

    def times(self) -> Floats:
        """Return the times of all lines, in order."""
        events = [event["time"] for event in self.events if _is_time(event.get("time"))]
        times = numpy.concatenate([self.columns.time, numpy.array(events, dtype=float)])
        return numpy.sort(times[numpy.isfinite(times)])


@dataclass(frozen=True, slots=True)
class LaunchSpan:
    """One start of the program.

    Attributes:
        began, ended: in Unix time; the end of a killed launch is the time of its last line.
        start_seconds: from the start of its processes to its first iteration.
        record: its line in `launches.jsonl`; empty for a run of an older version.
        end: the line of its end; None for a launch that is running or was killed.
        first: the record of its first iteration; None for a launch without one.
    """

    began: float
    ended: float
    start_seconds: float
    record: Json
    end: Json | None
    first: Json | None


@dataclass(frozen=True, slots=True)
class History:
    """What the folder of a run records.

    Attributes:
        log: the iterations of the run, each once.
        abandoned: lines of iterations that a later launch has repeated, or left.
        launches: in order of time; empty where the log has no times.
    """

    folder: Path
    log: Log
    abandoned: tuple[Log, ...]
    launches: tuple[LaunchSpan, ...]

    def evaluations(self) -> dict[int, Reading]:
        """Return the validation losses by iteration."""
        return self.log.evaluations

    @property
    def tokens_per_sample(self) -> float:
        """The sequence length, from the speed and the samples of iterations; NaN for a log without them."""
        columns = self.log.columns
        samples = numpy.diff(columns.samples)
        follows = (numpy.diff(columns.iteration) == 1) & (samples > 0)
        if not follows.any():
            return math.nan
        tokens = (columns.speed * columns.seconds)[1:][follows] / samples[follows]
        return float(numpy.round(numpy.nanmedian(tokens)))


def run_folder(path: str | Path) -> Path:
    """Return the folder of a run, given it, its metrics.jsonl or its folder of checkpoints."""
    path = Path(path)
    if not is_dir(path):
        return path.parent if path.name == METRICS_FILE else path
    is_of_checkpoints = not exists(path / METRICS_FILE) and exists(path.parent / METRICS_FILE)
    return path.parent if is_of_checkpoints else path


def read_history(path: str | Path) -> History:
    """Read the history of a run.

    Args:
        path: the folder of the run, or its metrics.jsonl.

    Raises:
        DataError: the log cannot be read or holds no iteration; the message has the file and the line.
    """
    folder = run_folder(path)
    log = _read_log(folder / METRICS_FILE)
    if not log.columns.iteration.size:
        raise DataError("There is no iteration in the log of a run", where=folder / METRICS_FILE)
    sides = matching(folder, f"{Path(METRICS_FILE).stem}.abandoned-*.jsonl")
    abandoned = tuple(_read_log(side, is_abandoned=True) for side in sides)
    records = _launch_records(folder / LAUNCHES)
    return History(folder, log, abandoned, _launches(records, [log, *abandoned]))


def _read_log(path: Path, *, is_abandoned: bool = False) -> Log:
    log = read_log(path, _KEYS, skips_damaged=is_abandoned)
    columns = LogColumns(log.iterations.astype(float), *log.values)
    columns = columns._replace(time=numpy.where(columns.time <= LATEST, columns.time, math.nan))
    losses = {iteration: Reading(*pair) for iteration, pair in log.evaluations().items()}
    return Log(columns, tuple(event for _, event in log.events), tuple(start for _, start in log.starts), losses)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_time(value: object) -> bool:
    return _is_number(value) and cast(float, value) <= LATEST


def _launch_records(path: Path) -> list[Json]:
    records = [record for _, record in read_records(path)] if exists(path) else []
    return [record for record in records if _is_time(record.get("time")) and isinstance(record.get("launch"), str)]


def _launches(records: Sequence[Json], logs: Sequence[Log]) -> tuple[LaunchSpan, ...]:
    """Join the records of launches with the lines of the logs, which alone tell the launches of older versions."""
    firsts = [record for log in logs for record in log.starts if _is_time(record.get("time"))]
    ends = {record.get("launch"): record for record in records if record.get("event") == "end"}
    begins = {record.get("launch"): record for record in records if _is_time(record.get("began"))}
    of_launch = {name: record for record in firsts if (name := _launch_of(record)) in begins}
    starts = [(float(record["began"]), record, of_launch.get(name)) for name, record in begins.items()]
    starts += [(_began(record), {}, record) for record in firsts if _launch_of(record) not in begins]
    starts.sort(key=lambda start: start[0])
    times = numpy.sort(numpy.concatenate([log.times() for log in logs]))
    borders = numpy.searchsorted(times, [*(began for began, _, _ in starts), math.inf])
    launches = list[LaunchSpan]()
    for number, (began, record, first) in enumerate(starts):
        end = ends.get(record.get("launch")) if record else None
        inside = times[borders[number] : borders[number + 1]]
        last = max([began, *(float(line["time"]) for line in (record, end) if line), *inside[-1:].tolist()])
        start = _start_seconds(first) if first else float(record["time"]) - began
        launches.append(LaunchSpan(began, last, start, record, end, first))
    return tuple(launches)


def _launch_of(first: Json) -> str | None:
    """Return the name of the launch of a first iteration."""
    name = first.get("launch")
    return name if isinstance(name, str) else None


def _began(first: Json) -> float:
    """Return the time at which a launch began, from its first iteration."""
    return float(first["time"]) - _start_seconds(first) - sum_of(first, "seconds", "checkpoint_seconds")


def _start_seconds(first: Json) -> float:
    start = first.get("start")
    return sum_of(start, "seconds") if isinstance(start, dict) else 0.0


def sum_of(record: Json, *keys: str) -> float:
    """Return the sum of the numbers of a record under some keys."""
    return float(sum(record[key] for key in keys if _is_number(record.get(key))))
