"""Reads `metrics.jsonl` into columns. Repeated iterations are all kept; callers choose among them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from reprise.errors import DataError
from reprise.storage import MAX_INTEGER, Json, integer
from trainer.metrics.json_lines import ABSENT, DECIMAL, EXACT, UNREADABLE, JsonLines, open_log, value_of

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]
Kinds = NDArray[numpy.uint8]
Mask = NDArray[numpy.bool_]
VALID_LOSS = "valid_loss"


@dataclass(frozen=True, slots=True, eq=False)
class MetricColumns:
    """Values by iteration. A million iterations with three quantities take 35 MB.

    Attributes:
        quantities: The column names.
        values: Shape (quantities, iterations). NaN marks an absent or unreadable value.
        kinds: Same shape. The kind for each value, such as `EXACT`.
    """

    iterations: Integers
    quantities: tuple[str, ...]
    values: Floats
    kinds: Kinds

    @staticmethod
    def of(
        iterations: Sequence[int], quantities: Sequence[str], cells: Sequence[Sequence[tuple[float, int]]]
    ) -> MetricColumns:
        """Return columns built from cells: a row per iteration, each cell a value and its kind."""
        pairs = numpy.array(cells, dtype=float).reshape(len(iterations), len(quantities), 2).T
        numbers = numpy.array(iterations, dtype=numpy.int64)
        return MetricColumns(numbers, tuple(quantities), pairs[0], pairs[1].astype(numpy.uint8))

    def column(self, quantity: str) -> Floats:
        """Return a quantity's values."""
        column: Floats = self.values[self.quantities.index(quantity)]
        return column

    def take(self, places: Integers | Mask) -> MetricColumns:
        """Return the iterations at the given places."""
        return MetricColumns(self.iterations[places], self.quantities, self.values[:, places], self.kinds[:, places])

    def __len__(self) -> int:
        return len(self.iterations)


@dataclass(frozen=True, slots=True, eq=False)
class MetricsLog:
    """The records in a `metrics.jsonl`.

    Attributes:
        columns: The training iterations, in line order.
        lines: Their line numbers.
        evaluations: The validation losses, sorted by iteration. If an iteration repeats, its last loss wins.
        events: Event records, such as evaluations, saves and samples, each with its line number.
        starts: Records for the first iteration after a start, each with its place in the columns.
        notes: Remarks on the file, such as a torn last line.
        problems: An error for each quantity with an unusable value, about the first such value.
    """

    source: str
    columns: MetricColumns
    lines: Sequence[int]
    evaluations: MetricColumns
    events: Sequence[tuple[int, Json]]
    starts: Sequence[tuple[int, Json]]
    notes: tuple[str, ...]
    problems: dict[str, DataError]

    def require_usable(self, *quantities: str) -> None:
        """Check that every iteration number and every value of these quantities is usable.

        Raises:
            DataError: A value is unusable.
        """
        for quantity in ("iteration", *quantities):
            if quantity in self.problems:
                raise self.problems[quantity]

    def place(self, line: int) -> str:
        """Return a line's place for messages."""
        return f"{self.source}, line {line}"


class _Table:
    """Columns under construction while a log is being read."""

    def __init__(self, quantities: Sequence[str], source: str, problems: dict[str, DataError]) -> None:
        self._quantities, self._source, self._problems = tuple(quantities), source, problems
        self.lines = array("q")
        self._parts = [MetricColumns.of([], self._quantities, [])]

    def add(self, numbered: Sequence[tuple[int, Json]]) -> list[Json]:
        """Add numbered records, and return those with a valid iteration."""
        iterations: list[Any] = [record.get("iteration") for _, record in numbered]
        if {*map(type, iterations)} != {int} or min(iterations) < 0 or max(iterations) > MAX_INTEGER:
            numbered = [pair for pair in numbered if self._has_iteration(*pair)]
        rows = [record for _, record in numbered]
        shape = len(self._quantities), len(rows)
        values, kinds = numpy.empty(shape), numpy.empty(shape, dtype=numpy.uint8)
        for number, quantity in enumerate(self._quantities):
            values[number], kinds[number] = _column(rows, quantity)
        for number, place in numpy.argwhere(kinds == UNREADABLE).tolist():
            name, (line, record) = self._quantities[number], numbered[place]
            self._refuse(name, name, line, f"{record.get(name)!r} and {record.get(f'{name}_hex')!r}"[:120])
        self.lines.extend(line for line, _ in numbered)
        self._parts.append(
            MetricColumns(numpy.array([row["iteration"] for row in rows], dtype=numpy.int64), (), values, kinds)
        )
        return rows

    def columns(self) -> MetricColumns:
        """Return the columns for all added records."""
        parts = [(part.iterations, part.values, part.kinds) for part in self._parts]
        iterations, values, kinds = (numpy.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True))
        return MetricColumns(iterations, self._quantities, values, kinds)

    def _has_iteration(self, line: int, record: Json) -> bool:
        try:
            integer(record.get("iteration"))
        except ValueError as error:
            self._refuse("iteration", "the iteration", line, error)
            return False
        return True

    def _refuse(self, quantity: str, name: str, line: int, content: object) -> None:
        where, expected = f"{self._source}, line {line}", "a number, or a string from float.hex()"
        self._problems.setdefault(
            quantity, DataError(f"Cannot read {name}", where=where, expected=expected, found=content)
        )


def read_log(path: str | Path, quantities: Sequence[str], *, skips_damaged: bool = False) -> MetricsLog:
    """Read a `metrics.jsonl`. See `read_lines`.

    Raises:
        DataError: The file cannot be read, or a line is not a JSON object.
    """
    with open_log(path) as file:
        return read_lines(file, str(path), quantities, skips_damaged=skips_damaged)


def read_lines(file: BinaryIO, source: str, quantities: Sequence[str], *, skips_damaged: bool = False) -> MetricsLog:
    """Parse a `metrics.jsonl` in chunks.

    Args:
        source: The file's name in messages.
        quantities: The columns to read.
        skips_damaged: Whether to skip damaged lines instead of raising.

    Raises:
        DataError: A line is not a JSON object.
    """
    events, starts, problems = list[tuple[int, Json]](), list[tuple[int, Json]](), dict[str, DataError]()
    training, validation = (_Table(names, source, problems) for names in (quantities, (VALID_LOSS,)))
    read = JsonLines(file, source, skips_damaged=skips_damaged)
    for first, records in read.chunks():
        numbered = [*enumerate(records, first)]
        trained = [pair for pair in numbered if "event" not in pair[1] and ("loss" in pair[1] or "loss_hex" in pair[1])]
        count = len(training.lines)
        rows = training.add(trained)
        starts += [pair for pair in enumerate(rows, count) if "start" in pair[1] or "resumed" in pair[1]]
        if len(trained) < len(numbered):
            events += [pair for pair in numbered if "event" in pair[1]]
            evaluated = [pair for pair in numbered if pair[1].get("event") == "evaluation"]
            validation.add([pair for pair in evaluated if value_of(pair[1], VALID_LOSS)[1] != ABSENT])
    losses = validation.columns()
    last = len(losses) - 1 - numpy.unique(losses.iterations[::-1], return_index=True)[1]
    notes = tuple(read.notes)
    return MetricsLog(source, training.columns(), training.lines, losses.take(last), events, starts, notes, problems)


def _column(rows: Sequence[Json], quantity: str) -> tuple[Sequence[float] | Floats, int | Sequence[int] | Kinds]:
    """Return a quantity's values and kinds. Values with a common kind, the usual case, are converted together."""
    texts: list[Any] = [row.get(f"{quantity}_hex") for row in rows]
    types = set(map(type, texts))
    if types == {str}:
        try:
            return [*map(float.fromhex, texts)], EXACT
        except (ValueError, OverflowError):
            pass
    decimals = [row.get(quantity) for row in rows]
    if types == {type(None)} and set(map(type, decimals)) == {float}:
        values = numpy.array(decimals, dtype=float)
        return values, numpy.where(numpy.isfinite(values), DECIMAL, EXACT)
    pairs = [value_of(row, quantity) for row in rows]
    return [value for value, _ in pairs], [kind for _, kind in pairs]
