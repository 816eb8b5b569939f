"""Reads the loss curve of a metrics.jsonl into columns, a few MB of the file in memory at a time.

A regular expression reads the lines of training in the form of `trainer/metrics`; any other line goes through `json`.
The expression matches nothing but JSON, so the result is that of `json` for every line.
"""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

import numpy

from trainer.compare.columns import Floats, Integers, Mask, Points
from trainer.compare.points import QUANTITIES, Point

BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# `json` refuses an integer of more than 4,300 digits.
_NUMBER = rb"(?!0[0-9])[0-9]{1,100}+(?:\.[0-9]++)?+(?:e[-+][0-9]++)?+"
_HEX = rb'"(0x(?:1\.[0-9a-f]{13}p[-+][0-9]{1,3}+|0\.0p\+0))"'  # `float.hex()` of most numbers, all of them in range
_HEX_BYTES = len("0x1.0123456789abcp+123")
_OPTIONAL = b"".join(
    rb'(?:, "%b": %b, "%b_hex": %b)?+' % (name.encode(), _NUMBER, name.encode(), _HEX) for name in QUANTITIES[1:]
)
# A repeated key counts in JSON, so no later member may be of those that are read.
_LATER = rb', "(?!(?:iteration|event|loss|grad_norm|lr|valid_loss)(?:_hex)?")[a-z_]++": ' + _NUMBER
_LINES = re.compile(
    rb'\{"iteration": (0|[1-9][0-9]{0,17}+), "loss": %b, "loss_hex": %b%b(?:%b)*+\}\n'
    % (_NUMBER, _HEX, _OPTIONAL, _LATER)
    + rb"|([^\n]*+\n|[^\n]++)"
)


class PointColumns:
    """Grows by blocks of lines and by single points; remembers the line of each."""

    def __init__(self) -> None:
        self._lines, self._iterations = list[Integers](), list[Integers]()
        self._values, self._exact, self._present = list[Floats](), list[Mask](), list[Mask]()

    def add(self, lines: Integers, points: Points) -> None:
        """Add points and the numbers of their lines."""
        self._lines.append(lines)
        self._iterations.append(points.iterations)
        self._values.append(points.values)
        self._exact.append(points.exact)
        self._present.append(points.present)

    def joined(self) -> tuple[Integers, Points]:
        """Return the line numbers and the points, in the order of iterations, then of lines."""
        if not self._lines:
            return numpy.empty(0, dtype=numpy.int64), Points.of(())
        lines = numpy.concatenate(self._lines)
        points = Points(
            numpy.concatenate(self._iterations),
            numpy.concatenate(self._values, axis=1),
            numpy.concatenate(self._exact, axis=1),
            numpy.concatenate(self._present, axis=1),
        )
        if (numpy.diff(points.iterations) > 0).all() and (numpy.diff(lines) > 0).all():
            return lines, points
        order = numpy.lexsort((lines, points.iterations))
        return lines[order], points.take(order)


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, about `BLOCK_BYTES` at a time, without a byte order mark; a torn line comes last."""
    parts = [file.read(BLOCK_BYTES).removeprefix(_BYTE_ORDER_MARK)]
    while block := file.read(BLOCK_BYTES):
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*parts, block[:end]])
            parts = []
        parts.append(block[end:])
    yield b"".join(parts)


def read_points(blocks: Iterable[bytes], *, read_line: Callable[[int, bytes], Point | None]) -> tuple[Integers, Points]:
    """Read the points of a metrics.jsonl.

    Args:
        blocks: its bytes, in blocks of whole lines.
        read_line: reads a line of another form, given its number and its bytes; None for a line without a loss.

    Returns:
        The numbers of the lines of the points, and the points, in the order of iterations, then of lines.
    """
    columns, first = PointColumns(), 1
    for block in blocks:
        rows = _LINES.findall(block)
        standard = [row for row in rows if row[0]]
        numbers = numpy.arange(first, first + len(rows), dtype=numpy.int64)
        if len(standard) < len(rows):
            places = [place for place, row in enumerate(rows) if not row[0]]
            parsed = [(place, read_line(first + place, rows[place][-1])) for place in places]
            pairs = [(place, point) for place, point in parsed if point is not None]
            columns.add(numbers[[place for place, _ in pairs]], Points.of([point for _, point in pairs]))
            numbers = numpy.delete(numbers, places)
        if standard:
            columns.add(numbers, _points(standard))
        first += len(rows)
    return columns.joined()


def _points(rows: Sequence[tuple[bytes, ...]]) -> Points:
    """Return the points of lines, from the groups of the expression."""
    iterations, *texts, _ = zip(*rows, strict=True)
    columns = [_floats(column) for column in texts]
    present = numpy.array([is_present for _, is_present in columns])
    values = numpy.array([column for column, _ in columns])
    return Points(numpy.fromstring(b" ".join(iterations), dtype=numpy.int64, sep=" "), values, present, present)


def _floats(texts: Sequence[bytes]) -> tuple[Floats, Mask]:
    """Return numbers from the texts of `_HEX`, and which texts are not empty; an empty text gives 0."""
    characters = numpy.array(texts, dtype=f"S{_HEX_BYTES}").view(numpy.uint8).reshape(-1, _HEX_BYTES)
    is_normal = characters[:, 2] == ord("1")
    digits = numpy.full((len(texts), 16), ord("0"), dtype=numpy.uint8)
    digits[is_normal, 3:] = characters[is_normal, 4:17]
    mantissa = numpy.frombuffer(unhexlify(digits.tobytes()), dtype=">u8").astype(numpy.int64)
    power = numpy.zeros(len(texts), dtype=numpy.int64)
    for column in characters[:, 19:].T:
        power = numpy.where(column > 0, 10 * power + column - ord("0"), power)
    power = numpy.where(characters[:, 18] == ord("-"), -power, power)
    bits = numpy.where(is_normal, (power + 1023 << 52) | mantissa, 0)
    return bits.view(numpy.float64), characters[:, 0] > 0


def first_repeated(lines: Integers, points: Points) -> tuple[int, int] | None:
    """Return the line and the iteration of the first repeated iteration, of points in order of iterations and lines."""
    repeated = numpy.flatnonzero(numpy.diff(points.iterations) == 0) + 1
    if not repeated.size:
        return None
    place = repeated[numpy.argmin(lines[repeated])]
    return int(lines[place]), int(points.iterations[place])
