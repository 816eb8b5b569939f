"""Reads files of JSON lines in a run's folder, `metrics.jsonl` among them, without an array.

A line is torn if it lacks its newline and holds no whole object. `NAME_hex` (`float.hex()`) goes before the decimal
`NAME`, which is null for NaN and infinity.
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
from typing import BinaryIO

from reprise.errors import DataError
from reprise.storage import Json, integer, open_regular

METRICS = "metrics.jsonl"  # the record of a run, which every run has
ABSENT, DECIMAL, EXACT, UNREADABLE = range(4)  # what a record has of a quantity; the bits of an exact value are known
LATEST = 2.0**37  # Unix time that a date can show, in the year 6325
LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_CHUNK_LINES = 512  # parsed by a single call, which takes half the time of a call each, and fits in the caches
_BLOCK_BYTES = 1 << 16
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


def read_records(path: Path) -> list[tuple[str, Json]]:
    """Return the objects of a file of JSON lines, each with its place; a torn last line is left out.

    Raises:
        DataError: the file cannot be read, or another line is no object.
    """
    with open_log(path) as file:
        return JsonLines(file, path).records()


@contextlib.contextmanager
def open_log(path: str | Path) -> Iterator[BinaryIO]:
    """Open a log of a run.

    Raises:
        DataError: the file cannot be opened, or its reader in the block raises an OSError.
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
            first, *lines = LINES.findall(file.read(size) + begun)
            yield from reversed(lines)
            begun = first
        if begun:
            yield begun
