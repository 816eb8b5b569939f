"""The log of a disk: every write with its data, every flush, every line that a job said, in the order of arrival."""

from __future__ import annotations

import enum
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ENTRY = struct.Struct("<BQQ")  # kind, offset or count, bytes of data that follow


class LogKind(enum.IntEnum):
    """What an entry of the log is."""

    WRITE = 0
    FLUSH = 1
    SAID = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log.

    Args:
        at: of a write, its offset on the disk in bytes. Of a flush, how many entries of the log it makes durable: those
            whose requests were answered before the flush was asked for. Of what was said, 0.
        data: of a write, its bytes. Of what was said, the text.
    """

    kind: LogKind
    at: int
    data: bytes | memoryview = b""


def encode(entry: Entry) -> bytes:
    """Return the bytes of an entry."""
    return _ENTRY.pack(entry.kind, entry.at, len(entry.data)) + bytes(entry.data)


def decode(data: bytes | memoryview) -> Iterator[Entry]:
    """Yield the entries of a log; an entry that is cut off at the end, as a killed server leaves it, is left out."""
    view, at = memoryview(data), 0
    while at + _ENTRY.size <= len(view):
        kind, offset, size = _ENTRY.unpack_from(view, at)
        at += _ENTRY.size
        if at + size > len(view):
            return
        yield Entry(LogKind(kind), offset, view[at : at + size])
        at += size


def read(path: Path) -> list[Entry]:
    """Return the entries of a log file. Their data stays in the file, which is mapped."""
    with path.open("rb") as file:
        return list(decode(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))))
