"""Reads loss curves from metrics files and training logs."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy

from reprise.errors import DataError
from reprise.storage import SMALL_BYTES, exists, is_dir, is_file, matching, read_regular
from trainer.compare.curves import QUANTITIES, Curve
from trainer.compare.formats import column_form_of
from trainer.compare.logs import first_object, parse_log, require_points
from trainer.metrics.json_lines import ABSENT, METRICS, open_log
from trainer.metrics.log_file import VALID_LOSS, MetricsLog, read_lines
from trainer.workers import spawned_pool

LLMC_LOG = "main.log"
CONFIG_FILE = "config.yaml"
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}  # by name
_EVENTS = "*tfevents*"
_HEAD_BYTES = 1 << 16
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_MOST_BYTES = 4 << 30  # the limit for a text log, which is held in memory
_LARGE_BYTES = 64 << 20  # reading a larger file takes longer than starting a process


def read_curve(path: str | Path, *, last_wins: bool = False) -> Curve:
    """Read training losses from a run folder (its metrics.jsonl), a metrics.jsonl, or a log in a known format.

    If a program counts from 0, its step 0 becomes iteration 1, and a note reports the shift. Evaluation lines in logs
    are skipped. NaN and infinity are values like any other.

    Args:
        path: The file or folder. The dtype comes from a config.yaml beside the metrics.jsonl.
        last_wins: Whether a later launch in a log replaces an earlier launch's points from its own first iteration on.

    Raises:
        DataError: The file cannot be read, has no training loss, repeats an iteration (in a text log: with different
            values), or has a malformed record. The message names the file and line.
    """
    run = read_run(path, QUANTITIES)
    if isinstance(run, MetricsLog):
        return replace(curve_of(run), dtype=read_dtype(Path(run.source).parent / CONFIG_FILE))
    file, text = run
    return parse_log(text, source=str(file), last_wins=last_wins)


def read_curves(paths: Sequence[str], *, last_wins: bool = False) -> list[Curve]:
    """Read several files' curves as `read_curve` does. Large files are read in parallel, up to one process per core."""
    workers = min(len(paths), os.cpu_count() or 1)
    if workers < 2 or min(map(_size_of, paths)) < _LARGE_BYTES:
        return [read_curve(path, last_wins=last_wins) for path in paths]
    with spawned_pool(workers) as pool:
        return [*pool.map(partial(read_curve, last_wins=last_wins), paths)]


def _size_of(path: str) -> int:
    file = run_file(path)
    return file.stat().st_size if is_file(file) else 0


def run_file(path: str | Path) -> Path:
    """Return a run's log file: metrics.jsonl, else llm.c's main.log, else the folder itself if it has event files."""
    path = Path(path)
    if not is_dir(path):
        return path
    for name in (METRICS, LLMC_LOG):
        if exists(path / name):
            return path / name
    return path if event_files(path) else path / METRICS


def event_files(path: Path) -> list[Path]:
    """Return the TensorBoard event files in a folder, or the path itself if it is an event file."""
    paths = matching(path, _EVENTS) if is_dir(path) else [path] if fnmatch(path.name, _EVENTS) else []
    return sorted(paths)


def read_run(path: str | Path, quantities: Sequence[str]) -> MetricsLog | tuple[Path, str]:
    """Read a run's log. For another program's log, return the file and its text.

    Args:
        path: The file or the run's folder.
        quantities: The columns to read.

    Raises:
        DataError: The file cannot be read, is not a regular file, is a text larger than 4 GiB, or has a damaged line.
    """
    file = run_file(path)
    if events := event_files(file):
        if find_spec("tensorboard") is None:
            raise DataError("Event files need tensorboard", where=file, fix="pip install 'torch-reprise[train]'.")
        from trainer.compare.events import table_of

        return file, table_of(events)
    with open_log(file) as stream:
        head = stream.read(_HEAD_BYTES)
        stream.seek(0)
        if _is_metrics(_decode(head), file):
            is_wide = head.startswith(_UTF_16)
            lines = io.BytesIO(_decode(stream.read()).encode()) if is_wide else stream
            return read_lines(lines, str(file), quantities)
        if os.fstat(stream.fileno()).st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"larger than {_MOST_BYTES} B", str(file))
        return file, _decode(stream.read())


def _decode(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 as written by PowerShell. Drop the zeros that a host crash leaves in a log."""
    encoding = "utf-16" if data.startswith(_UTF_16) else "utf-8-sig"
    return data.decode(encoding, errors="replace").replace("\0", "")


def curve_of(log: MetricsLog) -> Curve:
    """Return the curve from a run's log, whose columns must be `QUANTITIES`.

    Raises:
        DataError: No record has a loss, a loss cannot be read, or an iteration repeats.
    """
    log.require_usable(*QUANTITIES, VALID_LOSS)
    points = log.columns
    is_null = points.kinds[0] == ABSENT
    if is_null.any():
        where = log.place(log.lines[is_null.argmax()])
        raise DataError("A loss is null", where=where, expected='loss_hex beside it, such as "nan"')
    order = points.iterations.argsort(kind="stable")
    if (numpy.diff(order) != 1).any():
        points = points.take(order)
    repeated = order[1:][numpy.diff(points.iterations) == 0]
    if repeated.size:
        where, problem = log.place(log.lines[repeated.min()]), f"Iteration {log.columns.iterations[repeated.min()]}"
        raise DataError(f"{problem} comes twice", where=where, expected="one record per iteration")
    require_points(points, log.source)
    return Curve(log.source, points, log.evaluations, notes=log.notes)


def _is_metrics(text: str, file: Path) -> bool:
    """Return whether a text is a metrics.jsonl, judged by its first line, or else by the file's suffix."""
    record = first_object(text)
    keys = [*record] if record else []
    return "iteration" in keys or (file.suffix == ".jsonl" and column_form_of(keys) is None)


def read_dtype(config: Path) -> str | None:
    """Return `dtype` directly under `train:` in a config.yaml, or None if missing or unknown."""
    try:
        text = read_regular(config, limit_bytes=SMALL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    section = re.search(r"^train:[^\S\n]*\n((?:[^\S\n]+.*\n?|[^\S\n]*\n)*)", text, re.MULTILINE)
    child = section and re.match(r"(?:[^\S\n]*(?:#.*)?\n)*([^\S\n]+)", section[1])
    dtype = child and re.search(rf"^{child[1]}dtype:\s*['\"]?(\w+)", section[1], re.MULTILINE) if section else None
    return DTYPES.get(dtype[1].lower()) if dtype else None
