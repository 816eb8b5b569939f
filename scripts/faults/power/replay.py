"""The contents of a disk after a power cut: all flushed data and some of the unflushed data."""

from __future__ import annotations

import enum
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.faults.power.block_log import Entry, LogKind

SECTOR_BYTES = 512  # what a disk writes whole or not at all
_RATES = (0.1, 0.5, 0.9)  # how many of the writes that were not flushed survive, where some do
_TORN = 0.25  # the share of the surviving writes of which only some sectors do


class Survival(enum.Enum):
    """The part of the unflushed data that survives."""

    none = "none"
    some = "some"
    all = "all"


@dataclass(frozen=True, slots=True)
class PowerCut:
    """A power cut after the first `entries` entries of a log; `seed` selects the surviving data."""

    entries: int
    survival: Survival
    seed: int


def survivors(writes: Sequence[Entry], cut: PowerCut) -> Iterator[tuple[int, bytes | memoryview]]:
    """Yield offset and bytes of the surviving parts of unflushed writes, in order."""
    if cut.survival is Survival.none:
        return
    chance = random.Random(cut.seed)
    rate = 1.0 if cut.survival is Survival.all else chance.choice(_RATES)
    for write in writes:
        if chance.random() >= rate:
            continue
        if cut.survival is Survival.some and chance.random() < _TORN:
            yield from _sectors(write, chance)
        else:
            yield write.at, write.data


def _sectors(write: Entry, chance: random.Random) -> Iterator[tuple[int, bytes | memoryview]]:
    """Yield some sectors of a write: the first ones, or any."""
    starts = range(0, len(write.data), SECTOR_BYTES)
    if chance.random() < 0.5:
        end = SECTOR_BYTES * chance.randrange(len(starts))
        yield write.at, write.data[:end]
        return
    for start in starts:
        if chance.random() < 0.5:
            yield write.at + start, write.data[start : start + SECTOR_BYTES]


class Replay:
    """Replays a log and creates the disk of each cut.

    Args:
        flushed: a file with the disk at the start of the log; it is updated with all flushed data.
    """

    def __init__(self, entries: Iterable[Entry], flushed: Path) -> None:
        self._entries, self._path = iter(entries), flushed
        self._flushed = os.open(flushed, os.O_RDWR)
        self._at = 0
        self._waiting: list[tuple[int, Entry]] = []  # writes that are not flushed, with their numbers

    def advance(self, entries: int) -> None:
        """Advance to `entries` entries of the log; going back is not possible."""
        while self._at < entries:
            entry = next(self._entries)
            if entry.kind is LogKind.WRITE:
                self._waiting.append((self._at, entry))
            elif entry.kind is LogKind.FLUSH:
                for _, write in self._take_flushed(entry.at):
                    os.pwrite(self._flushed, write.data, write.at)
            self._at += 1

    def make(self, cut: PowerCut, image: Path) -> None:
        """Write the disk after `cut`, to which the log has advanced, to a new file `image`."""
        image.unlink(missing_ok=True)
        copy_sparse(self._path, image)
        target = os.open(image, os.O_WRONLY)
        try:
            for offset, data in survivors([write for _, write in self._waiting], cut):
                os.pwrite(target, data, offset)
        finally:
            os.close(target)

    def close(self) -> None:
        """Close the file."""
        os.close(self._flushed)

    def _take_flushed(self, covered: int) -> list[tuple[int, Entry]]:
        flushed = [(number, write) for number, write in self._waiting if number < covered]
        self._waiting = [(number, write) for number, write in self._waiting if number >= covered]
        return flushed


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file to a new file without its holes."""
    with source.open("rb") as reading, target.open("xb") as writing:
        size = os.fstat(reading.fileno()).st_size
        writing.truncate(size)
        at = 0
        while at < size:
            try:
                at = os.lseek(reading.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: no data is left
                return
            end = os.lseek(reading.fileno(), at, os.SEEK_HOLE)
            os.lseek(writing.fileno(), at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(writing.fileno(), reading.fileno(), at, end - at)
