"""Reads everything recorded in a run's folder: iterations as columns, events and launches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy

from reprise.errors import DataError
from reprise.storage import Json, exists, is_dir, matching
from trainer.compare.curves import QUANTITIES
from trainer.metrics.json_lines import LATEST, METRICS, read_records
from trainer.metrics.launch_log import LAUNCHES
from trainer.metrics.log_file import Floats, MetricsLog, read_log

SAMPLES, SPEED, SECONDS = "consumed_samples", "tokens_per_second", "seconds"
BLOCKED, DATA, TIME = "checkpoint_seconds", "data_seconds", "time"
SAVES = ("save", "local_save", "weights_save")  # names of save events
_LARGEST = 1e300  # larger numbers are ignored, so that sums stay finite


@dataclass(frozen=True, slots=True)
class LaunchSpan:
    """One launch's time span.

    Attributes:
        began, ended: Unix times. A killed launch ends with its last line.
        start_seconds: Seconds from process start to the first iteration.
        record: The launch's line in `launches.jsonl`. Empty for a run by an older version.
        end: The launch's end line. None if the launch is running or was killed.
        first: The record for the launch's first iteration, or None without iterations.
    """

    began: float
    ended: float
    start_seconds: float
    record: Json
    end: Json | None
    first: Json | None


@dataclass(frozen=True, slots=True)
class History:
    """What a run's folder records.

    Attributes:
        log: The run's iterations, each once.
        abandoned: Logs with iterations repeated or dropped by a later launch.
        launches: Launches in time order. Empty if the log has no times.
    """

    folder: Path
    log: MetricsLog
    abandoned: tuple[MetricsLog, ...]
    launches: tuple[LaunchSpan, ...]

    @property
    def logs(self) -> tuple[MetricsLog, ...]:
        """The logs for all iterations, abandoned ones included."""
        return (self.log, *self.abandoned)

    @property
    def tokens_per_sample(self) -> float:
        """The sequence length, derived from speed and sample counts. NaN if the log lacks them."""
        columns = self.log.columns
        samples = numpy.diff(columns.column(SAMPLES))
        follows = (numpy.diff(columns.iterations) == 1) & (samples > 0)
        if not follows.any():
            return math.nan
        tokens = (columns.column(SPEED) * columns.column(SECONDS))[1:][follows] / samples[follows]
        return float(numpy.round(numpy.nanmedian(tokens)))


def run_folder(path: str | Path) -> Path:
    """Return a run's folder, from the folder itself, its metrics.jsonl or its checkpoint folder."""
    path = Path(path)
    if not is_dir(path):
        return path.parent if path.name == METRICS else path
    is_of_checkpoints = not exists(path / METRICS) and exists(path.parent / METRICS)
    return path.parent if is_of_checkpoints else path


def read_history(path: str | Path) -> History:
    """Read a run's history.

    Args:
        path: The run's folder, its metrics.jsonl or its checkpoint folder.

    Raises:
        DataError: The log cannot be read or holds no iteration. The message names the file and, for a damaged line, its
            number.
    """
    folder = run_folder(path)
    log = _read_log(folder / METRICS)
    if not len(log.columns):
        raise DataError("The run's log has no iteration", where=folder / METRICS)
    sides = matching(folder, f"{Path(METRICS).stem}.abandoned-*.jsonl")
    abandoned = tuple(_read_log(side, is_abandoned=True) for side in sides)
    records = [record for _, record in read_records(folder / LAUNCHES)] if exists(folder / LAUNCHES) else []
    records = [record for record in records if _is_time(record.get("time")) and isinstance(record.get("launch"), str)]
    return History(folder, log, abandoned, _launches(records, [log, *abandoned]))


def _read_log(path: Path, *, is_abandoned: bool = False) -> MetricsLog:
    names = (*QUANTITIES, SAMPLES, SPEED, SECONDS, BLOCKED, DATA, TIME)
    log = read_log(path, names, skips_damaged=is_abandoned)
    times = log.columns.column(TIME)
    times[times > LATEST] = math.nan
    return log


def events_of(logs: Sequence[MetricsLog], *names: str) -> Iterator[Json]:
    """Yield the event records with the given names."""
    return (event for log in logs for _, event in log.events if event["event"] in names)


def times_of(log: MetricsLog) -> Floats:
    """Return the times in all lines, sorted."""
    events = [event["time"] for _, event in log.events if _is_time(event.get("time"))]
    times = numpy.concatenate([log.columns.column(TIME), numpy.array(events, dtype=float)])
    return numpy.sort(times[numpy.isfinite(times)])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_time(value: object) -> bool:
    return _is_number(value) and cast(float, value) <= LATEST


def _launches(records: Sequence[Json], logs: Sequence[MetricsLog]) -> tuple[LaunchSpan, ...]:
    """Join launch records with log lines, the only source for launches by older versions."""
    ends = {record["launch"]: record for record in records if record.get("event") == "end"}
    begins = {record["launch"]: record for record in records if _is_time(record.get("began"))}
    starts, firsts = list[tuple[float, Json, Json | None]](), dict[str, Json]()
    for record in (record for log in logs for _, record in log.starts if _is_time(record.get("time"))):
        name = record.get("launch")
        if isinstance(name, str) and name in begins:
            firsts[name] = record
        else:
            took = _start_seconds(record) + sum_of(record, "seconds", "checkpoint_seconds")
            starts.append((float(record["time"]) - took, {}, record))
    starts += [(float(record["began"]), record, firsts.get(name)) for name, record in begins.items()]
    starts.sort(key=lambda start: start[0])
    times = numpy.sort(numpy.concatenate([times_of(log) for log in logs]))
    borders = numpy.searchsorted(times, [*(began for began, _, _ in starts), math.inf])
    launches = list[LaunchSpan]()
    for number, (began, record, first) in enumerate(starts):
        end = ends.get(record["launch"]) if record else None
        inside = times[borders[number] : borders[number + 1]]
        last = max([began, *(float(line["time"]) for line in (record, end) if line), *inside[-1:].tolist()])
        start = _start_seconds(first) if first else float(record["time"]) - began
        launches.append(LaunchSpan(began, last, start, record, end, first))
    return tuple(launches)


def _start_seconds(first: Json) -> float:
    start = first.get("start")
    return sum_of(start, "seconds") if isinstance(start, dict) else 0.0


def sum_of(record: Json, *keys: str) -> float:
    """Return the sum over a record's numbers under the given keys."""
    return float(sum(record[key] for key in keys if _is_number(record.get(key))))
