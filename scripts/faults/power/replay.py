"""The contents of a disk after a power cut: all flushed data and some of the unflushed data."""

from __future__ import annotations

import enum
import os
import random
from collections.abc import Iterator, Sequence
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


def write_disk(entries: Sequence[Entry], cut: PowerCut, start: Path, image: Path) -> None:
    """Write the disk after a cut to a file `image`.

    Args:
        entries: the log.
        start: a file with the disk at the start of the log.
    """
    image.unlink(missing_ok=True)
    copy_sparse(start, image)
    waiting = list[tuple[int, Entry]]()  # writes that are not flushed, with their numbers
    with image.open("r+b") as disk:
        for number, entry in enumerate(entries[: cut.entries]):
            if entry.kind is LogKind.WRITE:
                waiting.append((number, entry))
            elif entry.kind is LogKind.FLUSH:
                for _, write in (flushed for flushed in waiting if flushed[0] < entry.at):
                    os.pwrite(disk.fileno(), write.data, write.at)
                waiting = [write for write in waiting if write[0] >= entry.at]
        for offset, data in survivors([write for _, write in waiting], cut):
            os.pwrite(disk.fileno(), data, offset)


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
