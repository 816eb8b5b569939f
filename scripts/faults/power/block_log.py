"""The log of a disk: every write with its data, every flush, every output line of a job, in order of arrival."""

from __future__ import annotations

import enum
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_ENTRY = struct.Struct("<BQQ")  # kind, offset or count, bytes of data that follow


class LogKind(enum.IntEnum):
    """The kind of a log entry."""

    WRITE = 0
    FLUSH = 1
    SAID = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the log.

    Args:
        at: for a write, its offset on the disk in bytes. For a flush, the number of entries that it makes durable:
            those whose requests were answered before the flush was requested. For output, 0.
        data: for a write, its bytes. For output, the text.
    """

    kind: LogKind
    at: int
    data: bytes | memoryview = b""


def encode(entry: Entry) -> bytes:
    """Return the bytes of an entry."""
    return _ENTRY.pack(entry.kind, entry.at, len(entry.data)) + bytes(entry.data)


def read(path: Path) -> list[Entry]:
    """Return the entries of a log file; a truncated last entry, as a killed server leaves it, is omitted.

    Their data stays in the file, which is mapped.
    """
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    entries, at = list[Entry](), 0
    while at + _ENTRY.size <= len(view):
        kind, offset, size = _ENTRY.unpack_from(view, at)
        at += _ENTRY.size
        if at + size > len(view):
            break
        entries.append(Entry(LogKind(kind), offset, view[at : at + size]))
        at += size
    return entries
