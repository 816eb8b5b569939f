"""Reads JSON-lines files in a run folder, such as `metrics.jsonl`. Does not import numpy.

A line is torn if it lacks a newline and holds no complete object. `NAME_hex` (`float.hex()`) takes precedence over the
decimal `NAME`, which is null for NaN and infinity.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from reprise.errors import DataError
from reprise.storage import MAX_INTEGER, Json, open_regular

METRICS = "metrics.jsonl"  # every run's metrics log
ABSENT, DECIMAL, EXACT, UNREADABLE = range(4)  # how a record states a value; only EXACT preserves all bits
LATEST = 2.0**37  # the largest accepted Unix time, in the year 6325
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_CHUNK_LINES = 512  # lines per JSON parser call: halves the parsing time and fits in the CPU caches
_BLOCK_BYTES = 1 << 16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_chunks(lines: Iterable[bytes], source: object, notes: list[str]) -> Iterator[tuple[int, list[Json]]]:
    """Yield chunks: the first line's number, and an object per line, empty for blank or torn lines.

    Args:
        source: The file's name in messages.
        notes: Gets a remark on a torn last line.

    Raises:
        DataError: A line is not a JSON object, or lacks its iteration.
    """

    def single(number: int, line: bytes) -> Json:
        record = _object(line)
        if record is None and line.strip():
            where = f"{source}, line {number}"
            if line.endswith(b"\n"):
                text = repr(line.strip()[:60].decode(errors="replace"))
                expected = "a JSON object with an iteration"
                raise DataError("Cannot read a metrics record", where=where, expected=expected, found=text)
            notes.append(f"{where} is torn (no newline at its end) and was left out")
        return record or {}

    first, remaining = 1, iter(lines)
    while chunk := list(islice(remaining, _CHUNK_LINES)):
        if first == 1:
            chunk[0] = chunk[0].removeprefix(_BYTE_ORDER_MARK)
        objects = _parsed(b"[" + b",".join(chunk) + b"]")
        is_whole = isinstance(objects, list) and len(objects) == len(chunk) and _are_records(objects)
        yield first, objects if is_whole else [single(number, line) for number, line in enumerate(chunk, first)]
        first += len(chunk)


def _object(line: bytes) -> Json | None:
    record = _parsed(line)
    return record if _are_records([record]) else None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def _are_records(values: Sequence[Any]) -> bool:
    """Return whether all values are objects with an iteration."""
    if {*map(type, values)} != {dict}:
        return False
    numbers = [record.get("iteration") for record in values]
    return {*map(type, numbers)} == {int} and 0 <= min(numbers) <= max(numbers) <= MAX_INTEGER


def read_records(path: Path) -> list[Json]:
    """Return the objects in a run's JSON-lines file. Skip a torn last line.

    Raises:
        DataError: The file cannot be read, or another line is not a JSON object with an iteration.
    """
    with open_log(path) as file:
        return [record for _, objects in read_chunks(file, path, []) for record in objects if record]


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


def time_of(record: Json, key: str = "time") -> float | None:
    """Return a record's Unix time, or None if it is absent or not plausible."""
    time, kind = value_of(record, key)
    return time if kind == DECIMAL and 0 < time <= LATEST else None


def record_of(line: bytes) -> Json | None:
    """Return a line's record, or None if the line is damaged, has no iteration or lacks its newline."""
    return _object(line) if line.endswith(b"\n") else None


def tail(path: Path) -> Iterator[bytes]:
    """Yield a file's lines from last to first, with their newlines. A missing file has no lines."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "rb") as file:
        at, partial = file.seek(0, os.SEEK_END), b""
        while at:
            size = min(at, _BLOCK_BYTES)
            at -= size
            file.seek(at)
            first, *lines = _LINES.findall(file.read(size) + partial)
            yield from reversed(lines)
            partial = first
        if partial:
            yield partial
