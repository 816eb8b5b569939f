"""Reads loss curves from metrics files and training logs."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from reprise.errors import DataError
from reprise.files import SMALL_BYTES, exists, is_dir, is_file, open_regular, read_regular
from reprise.json_file import integer
from trainer.compare.formats import column_form_of
from trainer.compare.logs import parse_log, require_points
from trainer.compare.points import QUANTITIES, Curve, Point, Reading
from trainer.compare.records import first_object, read_number, read_record
from trainer.workers import spawned_pool

METRICS_FILE = "metrics.jsonl"
LLMC_LOG = "main.log"
CONFIG_FILE = "config.yaml"
VALID_LOSS = "valid_loss"
_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
_HEAD_BYTES = 1 << 16
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# Larger than the metrics of 10 million iterations; all of it is held in memory.
_MOST_BYTES = 4 << 30
# Reading of it takes longer than the start of a process.
_LARGE_BYTES = 64 << 20


def read_curve(path: str | Path, *, last_wins: bool = False) -> Curve:
    """Read the training losses of a run folder (its metrics.jsonl), a metrics.jsonl, or a log in a known format.

    Where a program counts from 0, its step 0 becomes iteration 1, and a note reports that. Evaluation lines of logs are
    skipped. nan and inf are values like any other.

    Args:
        path: the file or folder; the dtype comes from a config.yaml beside the metrics.jsonl.
        last_wins: whether a later launch in a log replaces what an earlier one has logged from its first iteration on.

    Raises:
        DataError: the file cannot be read, holds no training loss, holds an iteration twice (in a text log: with other
            values) or a malformed record; the message has the file and the line.
    """
    what = "a loss curve"
    file = run_file(path)
    curve = _read_metrics(file, what=what) if file.suffix == ".jsonl" else None
    if curve is None:
        file, text, is_metrics = read_run_file(path, what=what)
        if not is_metrics:
            return parse_log(text, source=str(file), last_wins=last_wins)
        curve = parse_metrics(text, source=str(file))
    return replace(curve, dtype=read_dtype(file.parent / CONFIG_FILE))


def read_curves(paths: Sequence[str], *, last_wins: bool = False) -> list[Curve]:
    """Read the curves of several files as `read_curve` does; large ones side by side, a process for each core."""
    workers = min(len(paths), os.cpu_count() or 1)
    if workers < 2 or min(map(_size_of, paths)) < _LARGE_BYTES:
        return [read_curve(path, last_wins=last_wins) for path in paths]
    with spawned_pool(workers) as pool:
        return [*pool.map(partial(read_curve, last_wins=last_wins), paths)]


def _size_of(path: str) -> int:
    file = run_file(path)
    return file.stat().st_size if is_file(file) else 0


def run_file(path: str | Path) -> Path:
    """Return the file of a run: of a folder its metrics.jsonl, or llm.c's main.log if there is only that."""
    path = Path(path)
    file = path / METRICS_FILE if is_dir(path) else path
    return path / LLMC_LOG if is_dir(path) and not exists(file) and exists(path / LLMC_LOG) else file


def read_run_file(path: str | Path, *, what: str) -> tuple[Path, str, bool]:
    """Read the file of a run; return its path, its text, and whether it holds JSON lines.

    Args:
        path: the file, or a folder: then its metrics.jsonl, or llm.c's main.log if there is only that.
        what: the quantity to be read, for messages.

    Raises:
        DataError: it cannot be read, is not a regular file, or is larger than 4 GiB.
    """
    file = run_file(path)
    try:
        text = _decode(read_regular(file, limit_bytes=_MOST_BYTES))
    except OSError as error:
        raise _unreadable(file, what, error) from error
    return file, text, _is_metrics(text, file)


def _decode(data: bytes) -> str:
    """Decode UTF-8 or UTF-16, which PowerShell writes; a crash of a host leaves zeros in a log."""
    encoding = "utf-16" if data.startswith(_UTF_16) else "utf-8-sig"
    return data.decode(encoding, errors="replace").replace("\0", "")


def parse_metrics(text: str, *, source: str) -> Curve:
    """Parse the JSON lines of a metrics.jsonl: an object a line, `<quantity>_hex` (`float.hex()`) before its decimal.

    A malformed last line without a newline was truncated by a crash: it is left out, with a note.

    Raises:
        DataError: no record has a loss, an iteration comes twice, or a line is not a record.
    """
    return _parse_metrics(io.BytesIO(text.encode()), source=source)


def _read_metrics(path: Path, *, what: str) -> Curve | None:
    """Read the curve of a metrics.jsonl; None for JSON lines of another program, or in UTF-16."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise OSError(errno.EFBIG, f"larger than {_MOST_BYTES} B", str(path))
            head = file.read(_HEAD_BYTES)
            if b"\0" in head[:2] or head.startswith(_UTF_16) or not _is_metrics(_decode(head), path):
                return None
            file.seek(0)
            return _parse_metrics(file, source=str(path))
    except OSError as error:
        raise _unreadable(path, what, error) from error


def _unreadable(file: Path, what: str, error: OSError) -> DataError:
    expected = f"a run folder with {METRICS_FILE}, or a file of a run"
    return DataError(f"Cannot read {what}", where=file, expected=expected, found=error.strerror)


def _parse_metrics(file: BinaryIO, *, source: str) -> Curve:
    from trainer.compare.metrics_file import blocks_of, first_repeated, read_points

    lines = _MetricsLines(source)
    numbers, points = read_points(blocks_of(file), read_line=lines.read)
    repeated = first_repeated(numbers, points)
    if repeated and not 0 < lines.error_number < repeated[0]:
        number, iteration = repeated
        where = f"{source}, line {number}"
        raise DataError(f"Iteration {iteration} comes twice", where=where, expected="one record an iteration")
    if lines.error is not None:
        raise lines.error
    require_points(points, source)
    return Curve(source, points, notes=tuple(lines.notes), evaluations=lines.evaluations)


class _MetricsLines:
    """Reads the lines of a metrics.jsonl that are not of the usual form."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.notes: list[str] = []
        self.evaluations: dict[int, Reading] = {}
        self.error: DataError | None = None  # of the first unusable record: a line that is no record goes before
        self.error_number = 0  # of its line

    def read(self, number: int, data: bytes) -> Point | None:
        """Return the point of a line; None without a loss, and after an unusable record."""
        where = f"{self._source}, line {number}"
        line = data.decode(errors="replace")
        record = read_record(line.removesuffix("\n"), where, None if line.endswith("\n") else self.notes)
        if record is None or self.error is not None:
            return None
        try:
            loss = _reading_of_record(record, VALID_LOSS, where) if record.get("event") == "evaluation" else None
            if loss is not None:
                self.evaluations[_iteration(record, where)] = loss
            return _point_of_record(record, where)
        except DataError as error:
            self.error, self.error_number = error, number
            return None


def _is_metrics(text: str, file: Path) -> bool:
    """Return whether a text is that of a metrics.jsonl, by its first line, or by the file's name if that is unknown."""
    record = first_object(text)
    keys = [*record] if record else []
    return "iteration" in keys or (file.suffix == ".jsonl" and column_form_of(keys) is None)


def read_dtype(config: Path) -> str | None:
    """Find `dtype` directly under `train:` in a config.yaml; None if it is missing or unknown."""
    try:
        text = read_regular(config, limit_bytes=SMALL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    section = re.search(r"^train:[^\S\n]*\n((?:[^\S\n]+.*\n?|[^\S\n]*\n)*)", text, re.MULTILINE)
    child = section and re.match(r"(?:[^\S\n]*(?:#.*)?\n)*([^\S\n]+)", section[1])
    dtype = child and re.search(rf"^{child[1]}dtype:\s*['\"]?(\w+)", section[1], re.MULTILINE) if section else None
    return _DTYPES.get(dtype[1].lower()) if dtype else None


def _point_of_record(record: Mapping[str, object], where: str) -> Point | None:
    if "loss" not in record and "loss_hex" not in record:
        return None
    iteration = _iteration(record, where)
    loss, grad_norm, lr = (_reading_of_record(record, quantity, where) for quantity in QUANTITIES)
    if loss is None:
        raise DataError("A loss is null", where=where, expected='loss_hex beside it, such as "nan"')
    return Point(iteration, loss, grad_norm, lr)


def _iteration(record: Mapping[str, object], where: str) -> int:
    try:
        return integer(record.get("iteration"))
    except ValueError as error:
        raise DataError(
            "A record with a loss has no iteration", where=where, expected="an integer", found=str(error)
        ) from error


def _reading_of_record(record: Mapping[str, object], quantity: str, where: str) -> Reading | None:
    stored, decimal = record.get(f"{quantity}_hex"), record.get(quantity)
    if isinstance(stored, str):
        return read_number(stored, where, written_as_hex=True)
    if stored is None and isinstance(decimal, int | float) and not isinstance(decimal, bool):
        return read_number(repr(decimal), where)
    if stored is None and decimal is None:
        return None
    actual = f"{decimal!r} and {stored!r}"
    raise DataError(
        f"Cannot read {quantity}", where=where, expected=f"a number and a {quantity}_hex text", found=actual
    )
