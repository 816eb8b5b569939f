"""Reads the loss curve of a metrics.jsonl into columns, a few MB of the file in memory at a time.

A regular expression finds the lines of training in the form of `trainer/metrics`, whose numbers are read together; any
other line goes through `json`. The expression matches nothing but JSON, so the result is that of `json` for every line.
"""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import numpy
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trainer.compare.columns import Floats, Integers, Mask, Points
from trainer.compare.points import QUANTITIES, Point

BLOCK_BYTES = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# `json` refuses an integer of more than 4,300 digits.
_NUMBER = rb"(?:[1-9][0-9]{0,99}+|0)(?:\.[0-9]++)?+(?:e[-+][0-9]++)?+"
_HEX = rb'"0x(?:1\.[0-9a-f]{13}p[-+][0-9]{1,3}+|0\.0p\+0)"'  # `float.hex()` of most numbers, all of them in range
_HEX_BYTES = len("0x1.0123456789abcp+123")
_BEGIN = b'{"iteration": '
_QUANTITIES = b"".join(
    rb', "%b": %b, "%b_hex": %b' % (name.encode(), _NUMBER, name.encode(), _HEX) for name in QUANTITIES
)
# A repeated key counts in JSON, so no later member may be of those that are read.
_LATER = rb', "(?!(?:iteration|event|loss|grad_norm|lr|valid_loss)(?:_hex)?")([a-z_]++)": '


def _lines_with(later: bytes) -> re.Pattern[bytes]:
    """Return the expression of any number of lines, given that of the members after the quantities."""
    # Greedy, not possessive: around a group with alternatives, a possessive quantifier fails before Python 3.11.5.
    return re.compile(rb'(?:\{"iteration": (?:0|[1-9][0-9]{0,17}+)%b%b\}\n)*' % (_QUANTITIES, later))


# An expression is compiled for the members of a line, which takes seconds for 100,000 of them.
_LINES = _lines_with(rb"(?:%b%b){0,99}" % (_LATER, _NUMBER))


def _lines_like(line: bytes) -> re.Pattern[bytes]:
    """Return the expression of lines with the keys of a line of `_LINES`, which takes two thirds of the time."""
    return _lines_with(b"".join(rb', "%b": %b' % (key, _NUMBER) for key in re.findall(_LATER, line)))


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
    columns, first, usual = PointColumns(), 1, _LINES
    for block in blocks:
        spans, numbers = list[bytes](), list[Integers]()
        places, points = list[int](), list[Point]()
        begin = 0
        while begin < len(block):
            end = _end_of(usual, block, begin) or _end_of(_LINES, block, begin)
            if end:
                usual = _lines_like(block[begin:end].partition(b"\n")[0]) if usual is _LINES else usual
                spans.append(block[begin:end])
                numbers.append(numpy.arange(first, first + block.count(b"\n", begin, end)))
                first += len(numbers[-1])
            else:
                end = block.find(b"\n", begin) + 1 or len(block)
                point = read_line(first, block[begin:end])
                places += [] if point is None else [first]
                points += [] if point is None else [point]
                first += 1
            begin = end
        columns.add(numpy.array(places, dtype=numpy.int64), Points.of(points))
        if spans:
            columns.add(numpy.concatenate(numbers), _points(b"".join(spans)))
    return columns.joined()


def _end_of(lines: re.Pattern[bytes], block: bytes, begin: int) -> int:
    """Return the end of the lines that an expression matches; 0 for none."""
    found = lines.match(block, begin)
    return found.end() if found and found.end() > begin else 0


def _points(lines: bytes) -> Points:
    """Return the points of lines of `_LINES`."""
    text = numpy.frombuffer(lines + bytes(_HEX_BYTES), dtype=numpy.uint8)  # each number has bytes after it
    ends = numpy.flatnonzero(text == ord("\n"))
    digits = numpy.concatenate(([0], ends[:-1] + 1)) + len(_BEGIN)
    iterations = numpy.zeros(len(ends), dtype=numpy.int64)
    while (is_digit := text[digits] - ord("0") < 10).any():  # a byte below "0" wraps around
        iterations = numpy.where(is_digit, 10 * iterations + text[digits] - ord("0"), iterations)
        digits += is_digit
    begins = numpy.flatnonzero(text == ord("x")) - 1  # a letter of keys too, of which none has a digit
    values = _floats(sliding_window_view(text, _HEX_BYTES)[begins[text[begins] == ord("0")]])
    values = values.reshape(-1, len(QUANTITIES)).T
    is_there = numpy.ones(values.shape, dtype=bool)
    return Points(iterations, values, is_there, is_there)


def _floats(characters: NDArray[numpy.uint8]) -> Floats:
    """Return numbers from rows of characters that begin with a text of `_HEX`."""
    is_normal = characters[:, 2] == ord("1")
    digits = numpy.full((len(characters), 16), ord("0"), dtype=numpy.uint8)
    digits[:, 3:] = numpy.where(is_normal[:, None], characters[:, 4:17], ord("0"))
    mantissa = numpy.frombuffer(unhexlify(digits.tobytes()), dtype=">u8").astype(numpy.int64)
    power = numpy.zeros(len(characters), dtype=numpy.int64)
    for column in characters[:, 19:].T - ord("0"):
        power = numpy.where(column < 10, 10 * power + column, power)
    power = numpy.where(characters[:, 18] == ord("-"), -power, power)
    bits = numpy.where(is_normal, (power + 1023 << 52) | mantissa, 0)
    return bits.view(numpy.float64)


def first_repeated(lines: Integers, points: Points) -> tuple[int, int] | None:
    """Return the line and the iteration of the first repeated iteration, of points in order of iterations and lines."""
    repeated = numpy.flatnonzero(numpy.diff(points.iterations) == 0) + 1
    if not repeated.size:
        return None
    place = repeated[numpy.argmin(lines[repeated])]
    return int(lines[place]), int(points.iterations[place])
