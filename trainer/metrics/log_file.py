"""The reader of `metrics.jsonl` as columns. An iteration that comes twice stays twice: each view decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from reprise.errors import DataError
from reprise.storage import Json, integer
from trainer.metrics.json_lines import ABSENT, DECIMAL, EXACT, UNREADABLE, JsonLines, open_log, value_of

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]
Kinds = NDArray[numpy.uint8]
VALID_LOSS = "valid_loss"


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
    with open_log(path) as file:
        return read_lines(file, str(path), quantities, skips_damaged=skips_damaged)


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


def _unusable(quantity: str, where: str, content: object) -> DataError:
    return DataError(
        f"Cannot read {quantity}", where=where, expected="a number, or a text as of float.hex()", found=content
    )
