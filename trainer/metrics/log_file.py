"""The reader of `metrics.jsonl`, and of the other files of JSON lines in a run's folder.

A line is torn if it lacks its newline and holds no whole object. `NAME_hex` (`float.hex()`) goes before the decimal
`NAME`, which is null for NaN and infinity. An iteration that comes twice stays twice: each view decides.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from reprise.errors import DataError
from reprise.storage import Json, integer, open_regular

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]
Kinds = NDArray[numpy.uint8]
ABSENT, DECIMAL, EXACT, UNREADABLE = range(4)  # what a record has of a quantity; the bits of an exact value are known
VALID_LOSS = "valid_loss"
_CHUNK_LINES = 512  # parsed by a single call, which takes half the time of a call each, and fits in the caches
_BLOCK_BYTES = 1 << 16
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines:
    """The objects of a file of JSON lines, a chunk in memory at a time.

    Args:
        source: the file, for messages.
        skips_damaged: whether damaged lines are left out, and not refused.

    Attributes:
        notes: remarks on the file: a torn last line.
    """

    def __init__(self, lines: Iterable[bytes], source: object, *, skips_damaged: bool = False) -> None:
        self._lines, self._source, self._skips_damaged = lines, source, skips_damaged
        self.notes: list[str] = []

    def chunks(self) -> Iterator[tuple[int, list[Json]]]:
        """Yield the number of a line, and the objects from there on, an empty one for a line without an object.

        Raises:
            DataError: for a line that is no object.
        """
        first, remaining = 1, iter(self._lines)
        while lines := list(islice(remaining, _CHUNK_LINES)):
            if first == 1:
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            yield first, self._objects(first, lines)
            first += len(lines)

    def records(self) -> list[tuple[str, Json]]:
        """Return each object with its place."""
        return [
            (f"{self._source}, line {number}", record)
            for first, objects in self.chunks()
            for number, record in enumerate(objects, first)
            if record
        ]

    def _objects(self, first: int, lines: Sequence[bytes]) -> list[Json]:
        try:
            objects: list[Json] = json.loads(f"[{b','.join(lines).decode(errors='replace')}]")
            if len(objects) == len(lines) and set(map(type, objects)) == {dict}:
                return objects
        except (ValueError, RecursionError):
            pass
        return [self._object(number, line) for number, line in enumerate(lines, first)]

    def _object(self, number: int, line: bytes) -> Json:
        text, problem = line.decode(errors="replace"), ""
        try:
            value = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            value, problem = None, str(error)
        if isinstance(value, dict):
            return value
        where = f"{self._source}, line {number}"
        if not line.endswith(b"\n"):
            self.notes.append(f"{where} is torn (no newline at its end) and was left out")
        elif not self._skips_damaged:
            problem = problem or repr(value)[:60]
            raise DataError("Cannot read a metrics record", where=where, expected="a JSON object", found=problem)
        return {}


@dataclass(frozen=True, slots=True, eq=False)
class MetricsLog:
    """The records of a `metrics.jsonl`.

    Attributes:
        lines: the numbers of the lines of the iterations, in their order, which is that of the columns too.
        quantities: the names of the columns.
        values: of shape (quantities, iterations); NaN for an absent or unreadable value.
        kinds: of the same shape: the kinds of the values, such as `EXACT`.
        events: records of evaluations, saves and samples, each with the number of its line.
        starts: records of first iterations after a start, each with its place in the columns.
        notes: remarks on the file: a torn last line.
        problems: the first unusable value of each quantity.
    """

    source: str
    lines: Integers
    iterations: Integers
    quantities: tuple[str, ...]
    values: Floats
    kinds: Kinds
    events: tuple[tuple[int, Json], ...]
    starts: tuple[tuple[int, Json], ...]
    notes: tuple[str, ...]
    problems: dict[str, DataError]

    def place(self, line: int) -> str:
        """Return the place of a line for messages."""
        return f"{self.source}, line {line}"

    def column(self, quantity: str) -> Floats:
        """Return the values of a quantity."""
        column: Floats = self.values[self.quantities.index(quantity)]
        return column

    def require_usable(self, *quantities: str) -> None:
        """Refuse unusable values of some quantities, and of iterations.

        Raises:
            DataError: if there is one.
        """
        for quantity in ("iteration", *quantities):
            if quantity in self.problems:
                raise self.problems[quantity]

    def evaluations(self) -> dict[int, tuple[float, bool]]:
        """Return the validation losses by iteration, and whether their bits are known; the last one counts."""
        losses = dict[int, tuple[float, bool]]()
        for line, record in self.events:
            value, kind = value_of(record, VALID_LOSS)
            if record["event"] == "evaluation" and kind != ABSENT:
                try:
                    losses[integer(record.get("iteration"))] = value, kind == EXACT
                except ValueError as error:
                    self.problems.setdefault("iteration", _unusable("the iteration", self.place(line), error))
                if kind == UNREADABLE:
                    problem = _unusable(VALID_LOSS, self.place(line), record.get(VALID_LOSS))
                    self.problems.setdefault(VALID_LOSS, problem)
        return losses


def read_log(path: str | Path, quantities: Sequence[str], *, skips_damaged: bool = False) -> MetricsLog:
    """Read a `metrics.jsonl`; see `read_lines`.

    Raises:
        DataError: the file cannot be read, or a line is no object.
    """
    try:
        with os.fdopen(open_regular(Path(path)), "rb") as file:
            return read_lines(file, str(path), quantities, skips_damaged=skips_damaged)
    except OSError as error:
        raise unreadable_log(path, error) from error


def read_records(path: Path) -> list[tuple[str, Json]]:
    """Return the objects of a file of JSON lines, each with its place; a torn last line is left out.

    Raises:
        DataError: the file cannot be read, or another line is no object.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return JsonLines(file, path).records()
    except OSError as error:
        raise unreadable_log(path, error) from error


def unreadable_log(path: str | Path, error: OSError) -> DataError:
    """Return the error about a log that cannot be read."""
    expected = "a run folder with metrics.jsonl, or a file of a run"
    return DataError("Cannot read the log of a run", where=path, expected=expected, found=error.strerror)


def read_lines(file: BinaryIO, source: str, quantities: Sequence[str], *, skips_damaged: bool = False) -> MetricsLog:
    """Parse the bytes of a `metrics.jsonl`, a few in memory at a time.

    Args:
        quantities: the names of the columns to read.
        skips_damaged: whether lines that are no object are left out, and not refused.

    Raises:
        DataError: a line is no object.
    """
    parts = [_chunk_columns([], [], quantities)]
    events, starts, problems, count = list[tuple[int, Json]](), list[tuple[int, Json]](), dict[str, DataError](), 0
    read = JsonLines(file, source, skips_damaged=skips_damaged)
    for first, records in read.chunks():
        lines, rows = list[int](), list[Json]()
        for line, record in enumerate(records, first):
            if "event" in record:
                events.append((line, record))
            elif "loss" in record or "loss_hex" in record:
                try:
                    integer(record.get("iteration"))
                except ValueError as error:
                    problems.setdefault("iteration", _unusable("the iteration", f"{source}, line {line}", error))
                    continue
                lines.append(line)
                rows.append(record)
        starts += [(count + place, row) for place, row in enumerate(rows) if "start" in row or "resumed" in row]
        count += len(rows)
        parts.append(_chunk_columns(lines, rows, quantities))
        for column, place in numpy.argwhere(parts[-1][3] == UNREADABLE).tolist():
            name, row = quantities[column], rows[place]
            text = f"{row.get(name)!r} and {row.get(f'{name}_hex')!r}"
            problems.setdefault(name, _unusable(name, f"{source}, line {lines[place]}", text[:120]))
    of_lines, iterations, values, kinds = (numpy.concatenate(columns, axis=-1) for columns in zip(*parts, strict=True))
    names, notes = tuple(quantities), tuple(read.notes)
    return MetricsLog(source, of_lines, iterations, names, values, kinds, tuple(events), tuple(starts), notes, problems)


def _chunk_columns(
    lines: Sequence[int], rows: Sequence[Json], quantities: Sequence[str]
) -> tuple[Integers, Integers, Floats, Kinds]:
    """Return the lines and the iterations of some records, and the values and the kinds of their quantities."""
    columns = [_column(rows, quantity) for quantity in quantities]
    return (
        numpy.array(lines, dtype=numpy.int64),
        numpy.array([row["iteration"] for row in rows], dtype=numpy.int64),
        numpy.array([values for values, _ in columns], dtype=float).reshape(len(quantities), len(rows)),
        numpy.array([kinds for _, kinds in columns], dtype=numpy.uint8).reshape(len(quantities), len(rows)),
    )


def _column(rows: Sequence[Json], quantity: str) -> tuple[Sequence[float] | Floats, Sequence[int] | Kinds]:
    """Return the values and kinds of some records; those of one kind, as almost always, are read together."""
    key = f"{quantity}_hex"
    texts: list[Any] = [row.get(key) for row in rows]
    types = set(map(type, texts))
    if types == {str}:
        try:
            return [*map(float.fromhex, texts)], [EXACT] * len(rows)
        except (ValueError, OverflowError):
            pass
    decimals = [row.get(quantity) for row in rows]
    if types == {type(None)} and set(map(type, decimals)) == {float}:
        values = numpy.array(decimals, dtype=float)
        return values, numpy.where(numpy.isfinite(values), DECIMAL, EXACT)
    pairs = [value_of(row, quantity) for row in rows]
    return [value for value, _ in pairs], [kind for _, kind in pairs]


def value_of(record: Json, quantity: str) -> tuple[float, int]:
    """Return the value of a quantity in a record, NaN for an absent or an unreadable one, and its kind."""
    text, number = record.get(f"{quantity}_hex"), record.get(quantity)
    try:
        if text is not None:
            return float.fromhex(text), EXACT
        if number is None:
            return math.nan, ABSENT
        if type(number) in (int, float):
            value = float(number)
            return value, DECIMAL if math.isfinite(value) else EXACT
    except (TypeError, ValueError, OverflowError):
        pass
    return math.nan, UNREADABLE


def _unusable(quantity: str, where: str, content: object) -> DataError:
    return DataError(
        f"Cannot read {quantity}", where=where, expected="a number, or a text as of float.hex()", found=content
    )


def record_of(line: bytes) -> Json | None:
    """Return the record of a line; None for one without its newline, for a damaged one, and without an iteration."""
    try:
        record: Json = json.loads(line)
        integer(record["iteration"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return record if line.endswith(b"\n") else None


def tail(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file from its end, with their line ends; none for a missing file."""
    try:
        file: BinaryIO = os.fdopen(open_regular(path), "rb")
    except FileNotFoundError:
        file = io.BytesIO()
    with file:
        at, begun = file.seek(0, os.SEEK_END), b""
        while at:
            size = min(at, _BLOCK_BYTES)
            at -= size
            file.seek(at)
            first, *lines = _LINES.findall(file.read(size) + begun)
            yield from reversed(lines)
            begun = first
        if begun:
            yield begun
