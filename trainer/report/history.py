"""Reads everything recorded in a run's folder: iterations as columns, events and launches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from reprise.errors import DataError, count_of
from reprise.storage import Json, exists, is_dir, matching
from trainer.compare.curves import QUANTITIES
from trainer.metrics.json_lines import (
    DECIMAL,
    LATEST,
    METRICS,
    open_log,
    read_records,
    record_of,
    time_of,
    value_of,
)
from trainer.metrics.launch_log import LAUNCHES
from trainer.metrics.log_file import Floats, Integers, MetricsLog, read_lines

SPEED, SECONDS = "tokens_per_second", "seconds"
BLOCKED, DATA, TIME = "checkpoint_seconds", "data_seconds", "time"
SAVES = ("save", "local_save", "weights_save")  # names of save events
# Integers in a topology, and from which size they are shown.
_AXES = {"world_size": 1, "dp": 2, "replicate": 2, "tp": 2, "pp": 2, "vpp": 2, "zero_stage": 1}


@dataclass(frozen=True, slots=True)
class LaunchSpan:
    """One launch's time span.

    Attributes:
        began, ended: Unix times. A killed launch ends with its last line.
        start_seconds: Seconds from process start to the first iteration.
        record: The launch's line in `launches.jsonl`.
        end: The launch's end line. None if the launch is running or was killed.
    """

    began: float
    ended: float
    start_seconds: float
    record: Json
    end: Json | None

    @property
    def topology(self) -> str:
        return topology_text(self.record.get("topology", {}))

    def places(self, log: MetricsLog) -> Integers:
        """Return the places of this launch's iterations in a log's columns."""
        times = log.columns.column(TIME)
        return numpy.flatnonzero((times >= self.began) & (times <= self.ended))


@dataclass(frozen=True, slots=True)
class History:
    """What a run's folder records.

    Attributes:
        log: The run's iterations, each once.
        abandoned: Logs with iterations repeated or dropped by a later launch.
        launches: Launches in time order. Empty for a run by version 0.1, which did not record them.
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
    def tokens(self) -> Floats:
        """The tokens trained up to each iteration, as this log has them."""
        tokens: Floats = numpy.nancumsum(self.log.columns.column(SPEED) * self.log.columns.column(SECONDS))
        return tokens


def topology_text(topology: object) -> str:
    """Describe a record's rank count, its axes longer than 1, and its ZeRO stage. Other members are left out."""
    table = topology if isinstance(topology, dict) else {}
    sizes = {name: table[name] for name in _AXES if type(table.get(name)) is int}
    ranks = [count_of(sizes.pop("world_size"), "rank")] if "world_size" in sizes else []
    return " ".join([*ranks, *(f"{name}={size}" for name, size in sizes.items() if size >= _AXES[name])])


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
    records = read_records(folder / LAUNCHES) if exists(folder / LAUNCHES) else []
    return History(folder, log, abandoned, _launches(records, [log, *abandoned]))


def _read_log(path: Path, *, is_abandoned: bool = False) -> MetricsLog:
    """Read a log. Leave out an abandoned log's damaged lines, which a cut of the log moves there."""
    with open_log(path) as file:
        lines = (line if record_of(line) else b"\n" for line in file) if is_abandoned else file
        log = read_lines(lines, str(path), (*QUANTITIES, SPEED, SECONDS, BLOCKED, DATA, TIME))
    times = log.columns.column(TIME)
    times[times > LATEST] = math.nan
    return log


def events_of(logs: Sequence[MetricsLog], *names: str) -> Iterator[Json]:
    """Yield the event records with the given names."""
    return (event for log in logs for _, event in log.events if event["event"] in names)


def times_of(logs: Sequence[MetricsLog]) -> Floats:
    """Return the sorted times of all iterations and events."""
    moments = [time for log in logs for _, event in log.events if (time := time_of(event))]
    times = numpy.concatenate([*(log.columns.column(TIME) for log in logs), moments])
    return numpy.sort(times[numpy.isfinite(times)])


def _launches(records: Sequence[Json], logs: Sequence[MetricsLog]) -> tuple[LaunchSpan, ...]:
    """Return the launches. None begins before an earlier one's last line."""
    records = [record for record in records if time_of(record)]
    begins = [record for record in records if record.get("event") == "begin" and time_of(record, "began")]
    ends = [record for record in records if record.get("event") == "end"]
    times = numpy.sort(numpy.concatenate([times_of(logs), [record["time"] for record in records]]))
    launches = list[LaunchSpan]()
    for begin, until in zip(begins, [*(record["began"] for record in begins[1:]), math.inf], strict=True):
        first, end = _of_launch(begin, (record for log in logs for _, record in log.starts)), _of_launch(begin, ends)
        start = (first or {}).get("start")
        seconds = sum_of(start, "seconds") if isinstance(start, dict) else begin["time"] - begin["began"]
        last = max([begin["began"], *times[: times.searchsorted(until, "right")][-1:].tolist()])
        launches.append(LaunchSpan(begin["began"], last, seconds, begin, end))
    return tuple(launches)


def _of_launch(begin: Json, records: Iterable[Json]) -> Json | None:
    """Return the first record that names a launch."""
    return next((record for record in records if record.get("launch") == begin.get("launch")), None)


def sum_of(record: Json, *keys: str) -> float:
    """Return the sum over a record's numbers under the given keys."""
    return sum((value for value, kind in (value_of(record, key) for key in keys) if kind == DECIMAL), 0.0)
