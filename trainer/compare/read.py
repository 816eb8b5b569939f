"""Reads loss curves from metrics files and training logs."""

from __future__ import annotations

import errno
import io
import json
import math
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from reprise.errors import DataError
from reprise.files import SMALL_BYTES, exists, is_dir, is_file, open_regular, read_regular
from reprise.json_file import MAX_INTEGER, integer
from trainer.compare.points import QUANTITIES, Point, Reading

METRICS_FILE = "metrics.jsonl"
LLMC_LOG = "main.log"
CONFIG_FILE = "config.yaml"
VALID_LOSS = "valid_loss"
FORMATS = (
    "metrics.jsonl records with iteration and loss, `step 1/100 | train loss 4.2 |` (also `| loss 4.2`), "
    "`iter 10: loss 4.2,` (nanoGPT), ` iteration 10/ 100 | ... | lm loss: 4.2E+00 |` (Megatron), "
    "`s:9 trl:4.2` (main.log of llm.c), or `step 9: train loss 4.2 (took 8 ms)` (llm.c in C)"
)

_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FIELDS = {
    "loss": re.compile(r"\s*(?:(?:(?:train|lm)\s+)?loss:?\s+(?!scale\b)|trl:)([^\s,(]+)", re.IGNORECASE),
    "grad_norm": re.compile(r"\s*(?:(?:grad\s+)?norm:?\s+|norm:)([^\s,(]+)", re.IGNORECASE),
    "lr": re.compile(r"\s*(?:(?:lr|learning\s+rate):?\s+|lr:)([^\s,(]+)", re.IGNORECASE),
}
# Larger than the metrics of 10 million iterations; all of it is held in memory.
_MOST_BYTES = 4 << 30
# Reading of it takes longer than the start of a process.
_LARGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _LineForm:
    """The form of a program's training lines.

    Args:
        pattern: matches the iteration number, then the fields.
        separator: separates the fields.
        first: the number of the first iteration.
    """

    pattern: re.Pattern[str]
    separator: str
    first: int = 1


_LINE_FORMS = (
    _LineForm(re.compile(r"\b(?:step|iteration)\s+(\d+)\s*/\s*\d+\s*\|(.*)", re.IGNORECASE), "|"),
    # nanoGPT counts from 0 too, but evaluates at the same numbers; its iterations keep the names that it gives them.
    _LineForm(re.compile(r"\biter\s+(\d+):\s*(loss\s.*)", re.IGNORECASE), ","),
    # llm.c: llmc/logger.h and train_gpt2.py write main.log, train_gpt2.c prints; train_gpt2.cu prints the first form.
    _LineForm(re.compile(r"^s:(\d+)\s+(trl:.*)"), " ", first=0),
    _LineForm(re.compile(r"\bstep\s+(\d+):\s*(train\s+loss\s[^,(]*)\(took\b"), ",", first=0),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of a run in order of iteration, each iteration at most once; never empty from `read_curve`.

    Attributes:
        source: its file, for messages.
        dtype: the dtype in the run's config.yaml, `float32` or `bfloat16`; None if unknown.
        notes: remarks on the file for the report, such as a truncated last line.
        evaluations: the validation losses by iteration; none from a text log.
    """

    source: str
    points: Sequence[Point]
    dtype: str | None = None
    notes: tuple[str, ...] = ()
    evaluations: Mapping[int, Reading] = field(default_factory=dict)


def read_curve(path: str | Path, *, last_wins: bool = False) -> Curve:
    """Read the training losses of a run folder (its metrics.jsonl), a metrics.jsonl or a text log.

    Recognized text lines: this project's, llm.c's (train_gpt2.cu, train_gpt2.py) and InfiniTrain's `step 1/100 | ...`,
    nanoGPT's (train.py) `iter 1: loss ...`, Megatron-LM's (training.py, training_log) ` iteration 1/ 100 | ...`,
    llm.c's main.log `s:0 trl:... lr:... norm:...` and train_gpt2.c's `step 0: train loss ... (took ... ms)`. The last
    two count from 0: their step 0 becomes iteration 1, and a note reports that. Evaluation lines of
    text logs are skipped. nan and inf are values like any other.

    Args:
        path: the file or folder; the dtype comes from a config.yaml beside the metrics.jsonl.
        last_wins: let the later of two different text lines of an iteration win, as in the log of a resumed run.

    Raises:
        DataError: the file cannot be read, holds no training loss, holds an iteration twice (in a text log: with other
            values) or a malformed record; the message has the file and the line.
    """
    what = "a loss curve"
    file = run_file(path)
    if file.suffix == ".jsonl":
        curve = _read_metrics(file, what=what)
    else:
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
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin_worker) as pool:
        return [*pool.map(partial(read_curve, last_wins=last_wins), paths)]


def _begin_worker() -> None:
    """Initialize a process that reads: it ends when its parent does, and ignores the terminal's signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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
        text = read_regular(file, limit_bytes=_MOST_BYTES).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise _unreadable(file, what, error) from error
    return file, text, file.suffix == ".jsonl" or _begins_with_record(text)


def parse_metrics(text: str, *, source: str) -> Curve:
    """Parse the JSON lines of a metrics.jsonl: an object a line, `<quantity>_hex` (`float.hex()`) before its decimal.

    A malformed last line without a newline was truncated by a crash: it is left out, with a note.

    Raises:
        DataError: no record has a loss, an iteration comes twice, or a line is not a record.
    """
    return _parse_metrics(io.BytesIO(text.encode()), source=source)


def _read_metrics(path: Path, *, what: str) -> Curve:
    """Read the curve of a metrics.jsonl."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise OSError(errno.EFBIG, f"larger than {_MOST_BYTES} B", str(path))
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
    return replace(_curve(points, source, lines.notes), evaluations=lines.evaluations)


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
        record = _record(line.removesuffix("\n"), where, None if line.endswith("\n") else self.notes)
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


def parse_records(text: str, *, source: str) -> tuple[list[tuple[str, dict[str, object]]], list[str]]:
    """Parse the JSON lines of a metrics.jsonl; return each object with its location, and notes.

    Raises:
        DataError: a line is not a JSON object.
    """
    records: list[tuple[str, dict[str, object]]] = []
    notes: list[str] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        where = f"{source}, line {number}"
        record = _record(line, where, notes if number == len(lines) else None)
        if record is not None:
            records.append((where, record))
    return records, notes


def _record(line: str, where: str, notes: list[str] | None) -> dict[str, object] | None:
    """Return the object of a line; None for an empty line, and for a torn one, with a note.

    Args:
        notes: of the file, if the line is its last, without a newline.
    """
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if notes is not None:
            notes.append(f"{where} is torn (no newline at its end) and was left out")
            return None
        raise DataError("Cannot read a metrics record", where=where, expected="a JSON object", found=error) from error
    if not isinstance(record, dict):
        text = repr(record)[:60]
        raise DataError("Cannot read a metrics record", where=where, expected="a JSON object", found=text)
    return record


def parse_log(text: str, *, source: str, last_wins: bool = False) -> Curve:
    """Parse a text log, in the forms listed at `read_curve`.

    A last line without a newline may end inside a number, so it is read up to its last `|`, `,` or space only.

    Raises:
        DataError: there is no training line, a loss is not a number, or an iteration comes twice with other values.
    """
    points: dict[int, Point] = {}
    text = _ANSI_COLOUR.sub("", text)
    lines = re.split(r"\r\n|\r|\n", text)
    notes, counts_from_0 = list[str](), False
    for number, line in enumerate(lines, start=1):
        where = f"{source}, line {number}"
        torn = number == len(lines)
        parsed = _match(line[: max(map(line.rfind, "|, ")) + 1] if torn else line)
        point = None if parsed is None else _point_of_line(*parsed, where)
        if point is None or parsed is None:
            if torn and _match(line) is not None:
                notes.append(f"{where} is torn (no newline at its end) and was left out")
            continue
        earlier = points.get(point.iteration)
        if earlier is not None and earlier.bits != point.bits and not last_wins:
            raise DataError(
                f"Iteration {point.iteration} comes twice with other values",
                where=where,
                expected=f"loss {earlier.loss.value:.9g}",
                found=f"loss {point.loss.value:.9g}",
                fix="In the log of a resumed run the later lines can be taken with --last-wins.",
            )
        points[point.iteration] = point
        counts_from_0 = counts_from_0 or parsed[0].first == 0
    if counts_from_0:
        notes.append(f"{source} counts from 0, as llm.c does: its step 0 is iteration 1")
    if max(points, default=0) > MAX_INTEGER:
        raise DataError("An iteration is too large", where=source, expected=f"<= {MAX_INTEGER}", found=max(points))
    return _curve([points[iteration] for iteration in sorted(points)], source, notes)


def _begins_with_record(text: str) -> bool:
    try:
        record = json.loads(text.lstrip().partition("\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "iteration" in record


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
        return _reading(stored, where, written_as_hex=True)
    if stored is None and isinstance(decimal, int | float) and not isinstance(decimal, bool):
        return _reading(repr(decimal), where)
    if stored is None and decimal is None:
        return None
    actual = f"{decimal!r} and {stored!r}"
    raise DataError(
        f"Cannot read {quantity}", where=where, expected=f"a number and a {quantity}_hex text", found=actual
    )


def _match(line: str) -> tuple[_LineForm, re.Match[str]] | None:
    return next(((form, match) for form in _LINE_FORMS if (match := form.pattern.search(line))), None)


def _point_of_line(form: _LineForm, match: re.Match[str], where: str) -> Point | None:
    """Return the point of a line, or None if it has no loss; the first iteration is number 1."""
    fields = match[2].split(form.separator)
    readings: dict[str, Reading] = {}
    for quantity, pattern in _FIELDS.items():
        token = next((field_match[1] for field in fields if (field_match := pattern.match(field))), None)
        if token is not None:
            readings[quantity] = _reading(token, where)
    if "loss" not in readings:
        return None
    iteration = int(match[1]) + 1 - form.first
    return Point(iteration, readings["loss"], readings.get("grad_norm"), readings.get("lr"))


def _reading(text: str, where: str, *, written_as_hex: bool = False) -> Reading:
    """Parse a number; its bits are known if it is written as hex, and if it is nan or inf."""
    is_hex = written_as_hex or "0x" in text.lower()
    try:
        value = float.fromhex(text) if is_hex else float(text)
    except (ValueError, OverflowError) as error:
        raise DataError("Cannot read a number", where=where, found=repr(text[:60])) from error
    return Reading(value, is_hex or not math.isfinite(value))


def _curve(points: Sequence[Point], source: str, notes: Iterable[str]) -> Curve:
    if not len(points):
        raise DataError("There is no training loss", where=source, expected=FORMATS, found="none of these")
    return Curve(source, points, notes=tuple(notes))
