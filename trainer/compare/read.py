"""Reads loss curves from metrics files and training logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy
import yaml

from reprise.errors import DataError
from reprise.storage import exists, is_dir, matching, read_regular
from trainer.compare.curves import QUANTITIES, Curve
from trainer.compare.formats import column_form_of
from trainer.compare.logs import TextLog, first_object, parse_log, require_points
from trainer.metrics.json_lines import ABSENT, METRICS, open_log
from trainer.metrics.log_file import MetricsLog, read_lines

CONFIG_FILE = "config.yaml"
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}  # by name
_EVENTS = "*tfevents*"
_HEAD_BYTES = 1 << 16


def read_curve(path: str | Path) -> Curve:
    """Read training losses from a run folder (its metrics.jsonl), a metrics.jsonl, or a log in a known format.

    If a program counts from 0, its step 0 becomes iteration 1, and a note reports the shift. Evaluation lines in logs
    are skipped. NaN and infinity are values like any other.

    Args:
        path: The file or folder. The dtype comes from a config.yaml beside the metrics.jsonl.

    Raises:
        DataError: The file cannot be read, has no training loss, repeats an iteration (in a text log: in a launch, with
            different values), or has a malformed record. The message names the file and line.
    """
    run = read_run(path, QUANTITIES)
    if isinstance(run, MetricsLog):
        return replace(curve_of(run), dtype=read_dtype(Path(run.source).parent / CONFIG_FILE))
    return parse_log(run)


def run_file(path: str | Path) -> Path:
    """Return a run's log file: metrics.jsonl, or the folder itself if it has event files."""
    path = Path(path)
    if not is_dir(path) or (not exists(path / METRICS) and event_files(path)):
        return path
    return path / METRICS


def event_files(path: Path) -> list[Path]:
    """Return the TensorBoard event files in a folder, or the path itself if it is an event file."""
    return matching(path, _EVENTS) if is_dir(path) else [path] if fnmatch(path.name, _EVENTS) else []


def read_run(path: str | Path, quantities: Sequence[str]) -> MetricsLog | TextLog:
    """Read a run's log, or the text in another program's log.

    Args:
        path: The file or the run's folder.
        quantities: The columns to read.

    Raises:
        DataError: The file cannot be read, is not a regular file, or has a damaged line.
    """
    file = run_file(path)
    if events := event_files(file):
        from trainer.compare.events import table_of

        notes = list[str]()
        return TextLog(table_of(events, notes), str(file), notes)
    with open_log(file) as stream:
        head = stream.read(_HEAD_BYTES)
        stream.seek(0)
        if _is_metrics(_decode(head), file):
            return read_lines(stream, str(file), quantities)
        return TextLog(_decode(stream.read()), str(file))


def _decode(data: bytes) -> str:
    """Decode UTF-8. Drop the zeros that a host crash leaves in a log, and those in UTF-16."""
    return data.decode("utf-8-sig", errors="replace").replace("\0", "")


def curve_of(log: MetricsLog) -> Curve:
    """Return the curve from a run's log.

    Raises:
        DataError: No record has a loss, a value cannot be read, or an iteration repeats.
    """
    points, evaluations = log.readable(log.columns.only(*QUANTITIES)), log.readable(log.evaluations)
    is_null = points.kinds[0] == ABSENT
    if is_null.any():
        where = log.place(points.lines[is_null.argmax()])
        raise DataError("A loss is null", where=where, expected='loss_hex beside it, such as "nan"')
    if (numpy.diff(points.iterations) <= 0).any():
        points = points.take(points.iterations.argsort(kind="stable"))
    repeated = numpy.flatnonzero(numpy.diff(points.iterations) == 0) + 1
    for place in repeated[:1]:
        problem, where = f"Iteration {points.iterations[place]} comes twice", log.place(points.lines[place])
        raise DataError(problem, where=where, expected="one record per iteration")
    require_points(points, log.source)
    return Curve(log.source, points, evaluations, notes=log.notes)


def _is_metrics(text: str, file: Path) -> bool:
    """Return whether a text is a metrics.jsonl, judged by its first line, or else by the file's suffix."""
    record = first_object(text)
    keys = [*record] if record else []
    return "iteration" in keys or (file.suffix == ".jsonl" and column_form_of(keys) is None)


def read_dtype(config: Path) -> str | None:
    """Return the `dtype` in a config.yaml's `train` section, or None if missing or unknown."""
    try:
        text = read_regular(config)
        document = yaml.load(text, yaml.BaseLoader)  # all values are text, so another key's cannot be invalid
        return DTYPES.get(str(document["train"]["dtype"]).lower())
    except (OSError, yaml.YAMLError, LookupError, TypeError, RecursionError):
        return None
