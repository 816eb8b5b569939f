"""Reads JSON-lines files in a run folder, such as `metrics.jsonl`. Does not import numpy.

A line is torn if it lacks a newline and holds no complete object. `NAME_hex` (`float.hex()`) takes precedence over the
decimal `NAME`, which is null for NaN and infinity.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from reprise.errors import DataError
from reprise.storage import MAX_INTEGER, Json, integer, open_regular

METRICS = "metrics.jsonl"  # every run's metrics log
ABSENT, DECIMAL, EXACT, UNREADABLE = range(4)  # how a record states a value; only EXACT preserves all bits
LATEST = 2.0**37  # the largest accepted Unix time, in the year 6325
LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_CHUNK_LINES = 512  # lines per JSON parser call: halves the parsing time and fits in the CPU caches
_BLOCK_BYTES = 1 << 16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines:
    """The objects in a JSON-lines file, read in chunks.

    Args:
        source: The file's name in messages.
        skips_damaged: Whether to skip damaged lines instead of raising.
        is_log: Whether this is a run's file, where each object has an iteration.

    Attributes:
        notes: Remarks on the file, such as a torn last line.
    """

    def __init__(
        self, lines: Iterable[bytes], source: object, *, skips_damaged: bool = False, is_log: bool = True
    ) -> None:
        self._lines, self._source, self._skips_damaged, self._is_log = lines, source, skips_damaged, is_log
        self.notes: list[str] = []

    def chunks(self) -> Iterator[tuple[int, list[Json]]]:
        """Yield chunks: the first line's number, and an object per line, empty for blank or skipped lines.

        Raises:
            DataError: A line is not a JSON object, or lacks its iteration.
        """
        first, remaining = 1, iter(self._lines)
        while lines := list(islice(remaining, _CHUNK_LINES)):
            if first == 1:
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            yield first, self._objects(first, lines)
            first += len(lines)

    def records(self) -> list[tuple[str, Json]]:
        """Return each object with its source and line number."""
        return [
            (f"{self._source}, line {number}", record)
            for first, objects in self.chunks()
            for number, record in enumerate(objects, first)
            if record
        ]

    def _objects(self, first: int, lines: Sequence[bytes]) -> list[Json]:
        try:
            objects: list[Json] = json.loads(f"[{b','.join(lines).decode(errors='replace')}]")
            if len(objects) == len(lines) and set(map(type, objects)) == {dict} and self._have_iterations(objects):
                return objects
        except (ValueError, RecursionError):
            pass
        return [self._object(number, line) for number, line in enumerate(lines, first)]

    def _have_iterations(self, objects: Sequence[Json]) -> bool:
        numbers: list[Any] = [record.get("iteration") for record in objects] if self._is_log else [0]
        return {*map(type, numbers)} == {int} and 0 <= min(numbers) <= max(numbers) <= MAX_INTEGER

    def _object(self, number: int, line: bytes) -> Json:
        text, where = line.decode(errors="replace"), f"{self._source}, line {number}"
        if not text.strip():
            return {}
        try:
            value = json.loads(text)
            if isinstance(value, dict) and self._have_iterations([value]):
                return value
            problem = repr(value)[:60]
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if not line.endswith(b"\n"):
            self.notes.append(f"{where} is torn (no newline at its end) and was left out")
        elif not self._skips_damaged:
            expected = "a JSON object" + " with an iteration" * self._is_log
            raise DataError("Cannot read a metrics record", where=where, expected=expected, found=problem)
        return {}


def read_records(path: Path) -> list[Json]:
    """Return the objects in a run's JSON-lines file. Skip a torn last line.

    Raises:
        DataError: The file cannot be read, or another line is not a JSON object with an iteration.
    """
    with open_log(path) as file:
        return [record for _, record in JsonLines(file, path).records()]


@contextlib.contextmanager
def open_log(path: str | Path) -> Iterator[BinaryIO]:
    """Open a run's log for reading.

    Raises:
        DataError: The file cannot be opened, or the block raises an OSError.
    """
    try:
        with os.fdopen(open_regular(Path(path)), "rb") as file:
            yield file
    except OSError as error:
        raise DataError(
            "Cannot read the log of a run",
            where=path,
            expected="a run folder with metrics.jsonl, or a file of a run",
            found=error.strerror,
        ) from error


def value_of(record: Json, quantity: str) -> tuple[float, int]:
    """Return a record's value for a quantity and the value's kind. The value is NaN if absent or unreadable."""
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


def record_of(line: bytes) -> Json | None:
    """Return a line's record, or None if the line is damaged, has no iteration or lacks its newline."""
    try:
        record: Json = json.loads(line)
        integer(record["iteration"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return record if line.endswith(b"\n") else None


def tail(path: Path) -> Iterator[bytes]:
    """Yield a file's lines from last to first, with their newlines. A missing file has no lines."""
    try:
        file: BinaryIO = os.fdopen(open_regular(path), "rb")
    except FileNotFoundError:
        file = io.BytesIO()
    with file:
        at, partial = file.seek(0, os.SEEK_END), b""
        while at:
            size = min(at, _BLOCK_BYTES)
            at -= size
            file.seek(at)
            first, *lines = LINES.findall(file.read(size) + partial)
            yield from reversed(lines)
            partial = first
        if partial:
            yield partial
