"""Reads `metrics.jsonl` into columns. Repeated iterations are all kept; callers choose among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray

from reprise.errors import DataError
from reprise.storage import Json
from trainer.metrics.json_lines import ABSENT, DECIMAL, EXACT, UNREADABLE, read_chunks, value_of

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
        lines: Each iteration's line number. 0 in other programs' logs.
    """

    iterations: Integers
    quantities: tuple[str, ...]
    values: Floats
    kinds: Kinds
    lines: Integers

    def column(self, quantity: str) -> Floats:
        """Return a quantity's values."""
        column: Floats = self.values[self.quantities.index(quantity)]
        return column

    def only(self, *quantities: str) -> MetricColumns:
        """Return the given quantities."""
        rows = [self.quantities.index(quantity) for quantity in quantities]
        return replace(self, quantities=quantities, values=self.values[rows], kinds=self.kinds[rows])

    def take(self, places: Integers | Mask) -> MetricColumns:
        """Return the iterations at the given places."""
        return MetricColumns(
            self.iterations[places],
            self.quantities,
            self.values[:, places],
            self.kinds[:, places],
            self.lines[places],
        )

    def __len__(self) -> int:
        return len(self.iterations)


@dataclass(frozen=True, slots=True, eq=False)
class MetricsLog:
    """The records in a `metrics.jsonl`.

    Attributes:
        columns: The training iterations, in line order.
        evaluations: The validation losses, sorted by iteration. If an iteration repeats, its last loss wins.
        events: Event records, such as evaluations and saves, each with its line number.
        starts: Records for the first iteration after a start, each with its line number.
        notes: Remarks on the file, such as a torn last line.
    """

    source: str
    columns: MetricColumns
    evaluations: MetricColumns
    events: Sequence[tuple[int, Json]]
    starts: Sequence[tuple[int, Json]]
    notes: tuple[str, ...]

    def table(self, event: str, *quantities: str) -> MetricColumns:
        """Return the values in events with the given name."""
        return columns_of([(line, record) for line, record in self.events if record["event"] == event], quantities)

    def readable(self, columns: MetricColumns) -> MetricColumns:
        """Return some of this log's columns.

        Raises:
            DataError: A value is not a number.
        """
        for row, place in numpy.argwhere(columns.kinds == UNREADABLE)[:1].tolist():
            where, expected = self.place(columns.lines[place]), "a number, or a string from float.hex()"
            raise DataError(f"Cannot read {columns.quantities[row]}", where=where, expected=expected)
        return columns

    def place(self, line: int) -> str:
        """Return a line's place for messages."""
        return f"{self.source}, line {line}"


def read_lines(file: Iterable[bytes], source: str, quantities: Sequence[str]) -> MetricsLog:
    """Parse a `metrics.jsonl` in chunks.

    Args:
        source: The file's name in messages.
        quantities: The columns to read.

    Raises:
        DataError: A line is not a JSON object with an iteration.
    """
    events, starts = list[tuple[int, Json]](), list[tuple[int, Json]]()
    parts = [columns_of([], quantities)]
    notes = list[str]()
    for first, records in read_chunks(file, source, notes):
        trained = list[tuple[int, Json]]()
        for pair in enumerate(records, first):
            if "event" in pair[1]:
                events.append(pair)
            elif "loss" in pair[1] or "loss_hex" in pair[1]:
                trained.append(pair)
        parts.append(columns_of(trained, quantities))
        starts += [pair for pair in trained if "start" in pair[1] or "resumed" in pair[1]]
    evaluated = [pair for pair in events if pair[1]["event"] == "evaluation"]
    losses = columns_of([pair for pair in evaluated if value_of(pair[1], VALID_LOSS)[1] != ABSENT], [VALID_LOSS])
    last = len(losses) - 1 - numpy.unique(losses.iterations[::-1], return_index=True)[1]
    arrays = [(part.iterations, part.values, part.kinds, part.lines) for part in parts]
    iterations, values, kinds, lines = (numpy.concatenate(pieces, axis=-1) for pieces in zip(*arrays, strict=True))
    columns = MetricColumns(iterations, tuple(quantities), values, kinds, lines)
    return MetricsLog(source, columns, losses.take(last), events, starts, tuple(notes))


def columns_of(numbered: Sequence[tuple[int, Json]], quantities: Sequence[str]) -> MetricColumns:
    """Return records as columns. Each comes with its line number."""
    rows, shape = [record for _, record in numbered], (len(quantities), len(numbered))
    values, kinds = numpy.empty(shape), numpy.empty(shape, dtype=numpy.uint8)
    for number, quantity in enumerate(quantities):
        values[number], kinds[number] = _column(rows, quantity)
    iterations, lines = (
        numpy.array(numbers, dtype=numpy.int64)
        for numbers in ([row["iteration"] for row in rows], [line for line, _ in numbered])
    )
    return MetricColumns(iterations, tuple(quantities), values, kinds, lines)


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
