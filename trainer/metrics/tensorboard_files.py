"""TensorBoard's event files, cut where a run goes on from an earlier iteration.

TensorBoard itself drops what a run writes again, but of curves with few points, such as validation losses, some of its
readers show an abandoned branch until the next point comes; what is not in the files, no reader shows. Writing them is
TensorBoard's business, which `trainer/metrics/run_log.py` calls.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from trainer.atomic import replace_file, temporary_of
from trainer.checkpoint.storage.files import Files
from trainer.regular_file import read_regular

# A record is its length and a checksum of that, its bytes, and a checksum of those, little-endian: TFRecord, in
# TensorFlow's lib/io/record_writer.h.
_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")
# Every file begins with an event that says so: kVersionPrefix in TensorFlow's core/util/events_writer.h.
_VERSION = b"brain.Event:"
# TensorBoard reads the files of a folder in the order of their names, which begin with the second of their making.
_NAME = re.compile(r"(events\.out\.tfevents\.)(\d{10})(\..*)")
# The field `int64 step = 2` of the message Event, in TensorFlow's core/util/event.proto.
_STEP = 2
# What a wire type takes that says its length by itself: 64 and 32 bits, in Protocol Buffers' encoding.
_FIXED_BYTES = {1: 8, 5: 4}


def cut_events(folder: Path, iteration: int, *, but: str | None = None) -> None:
    """Take out of the event files of a folder what is beyond `iteration`, and what is torn.

    A process that is killed in here leaves every file either as it was or cut. One of before, stopped and gone on,
    still adds its points: TensorBoard's writer opens the file by its name for every write. A file that does not begin
    as TensorBoard's do is somebody else's and stays as it is.

    Args:
        folder: where TensorBoard's files are; one that is missing holds none.
        iteration: the last that stays.
        but: a curve whose point of that iteration goes too.

    Raises:
        OSError: the folder cannot be read or written.
    """
    files = Files()
    for path in sorted(folder.glob("events.out.tfevents.*")):
        files.remove_file(temporary_of(path))
        data = read_regular(path)
        if not _is_ours(data):
            continue
        kept = b"".join(record for record, event in _records(data) if _stays(event, iteration, but))
        if kept != data:
            replace_file(files, path, kept)


def put_before(folder: Path, second: int) -> None:
    """Rename event files, where they need it, so that one made at `second` or later comes after them all.

    Two launches may share a second, and the clock of another host may be behind. The files keep their order, also where
    a process is killed in here.

    Args:
        second: since the epoch, as it stands in the names.

    Raises:
        OSError: the folder cannot be read or written.
    """
    names = sorted(path.name for path in folder.glob("events.out.tfevents.*"))
    found = [match for match in map(_NAME.fullmatch, names) if match]
    for last, match in zip(range(second - len(found), second), found, strict=True):
        if int(match[2]) > last:
            Files().rename(folder / match[0], folder / f"{match[1]}{last:010d}{match[3]}")


def _is_ours(data: bytes) -> bool:
    return any(_VERSION in event for _, event in itertools.islice(_records(data), 1))


def _stays(event: bytes, iteration: int, but: str | None) -> bool:
    step = _step_of(event)
    return step < iteration or (step == iteration and (but is None or but.encode() not in event))


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield every whole record and the event in it."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, _ = _HEADER.unpack_from(data, at)
        end = at + _HEADER.size + length + _FOOTER.size
        if end > len(data):
            return
        yield data[at:end], data[at + _HEADER.size : end - _FOOTER.size]
        at = end


def _step_of(event: bytes) -> int:
    """Return the step of an event, which is 0 where it does not say one; what cannot be read ends the search."""
    at = 0
    try:
        while at < len(event):
            key, at = _varint(event, at)
            field, kind = key >> 3, key & 7
            if kind == 0:
                value, at = _varint(event, at)
                if field == _STEP:
                    return value
            elif kind == 2:
                length, at = _varint(event, at)
                at += length
            else:
                at += _FIXED_BYTES[kind]
    except (IndexError, KeyError):
        return 0
    return 0


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an integer of 7 bits a byte, the lowest first, and return it with where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at
