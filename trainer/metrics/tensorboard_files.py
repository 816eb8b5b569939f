"""Cuts TensorBoard's event files when a run resumes from an earlier iteration.

TensorBoard itself drops points a run writes again. For curves with few points, such as validation losses, some of its
readers show the abandoned branch until the next point arrives, so its points are removed from the files.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reprise.files import Files, read_regular, replace_file, temporary_of

# A record is its length and a checksum of that, its bytes, and a checksum of those, little-endian: TFRecord, in
# TensorFlow's lib/io/record_writer.h. Records are copied as they are: TensorBoard's own reader computes checksums byte
# by byte in Python and reads 2 MB/s, this one 40 MB/s (scalars, one core).
_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")
# Every file begins with an event that says so: kVersionPrefix in TensorFlow's core/util/events_writer.h.
_VERSION = "brain.Event:"
# TensorBoard reads the files of a folder in the order of their names, which begin with the second of their creation.
_NAME = re.compile(r"(events\.out\.tfevents\.)(\d{10})(\..*)")


def cut_events(folder: Path, iteration: int, *, files: Files, but: str | None = None) -> None:
    """Remove events after `iteration`, and truncated records, from the event files of a folder.

    A process killed in here leaves every file either unchanged or cut. An older, suspended process still adds its
    points when it continues, because TensorBoard's writer opens the file by name for every write. A file without
    TensorBoard's version event at its begin is left alone.

    Args:
        folder: TensorBoard's log folder; it may be missing.
        iteration: the last iteration to keep.
        but: tag of a curve whose point of `iteration` is removed too.

    Raises:
        OSError: the folder cannot be read or written.
    """
    for path in sorted(folder.glob("events.out.tfevents.*")):
        files.remove_file(temporary_of(path))
        data = read_regular(path)
        if not _is_ours(data):
            continue
        retained = b"".join(_kept(data, iteration, but))
        if retained != data:
            replace_file(files, path, retained)


def put_before(folder: Path, second: int, files: Files) -> None:
    """Rename event files, if necessary, so that a file created at `second` or later sorts after all of them.

    Two launches may share a second, and the clock of another host may lag. The files keep their order, even if the
    process is killed in here.

    Args:
        second: Unix time, as in the file names.

    Raises:
        OSError: the folder cannot be read or written.
    """
    names = sorted(path.name for path in folder.glob("events.out.tfevents.*"))
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    for last, match in zip(range(second - len(matches), second), matches, strict=True):
        if int(match[2]) > last:
            files.rename(folder / match[0], folder / f"{match[1]}{last:010d}{match[3]}")


def _kept(data: bytes, iteration: int, but: str | None) -> Iterator[bytes]:
    """Yield the retained records of a file; a truncated record at its end is dropped."""
    for record, payload in complete_records(data):
        event = _parsed(payload)
        is_redone = event.step == iteration and but in {value.tag for value in event.summary.value}
        if event.step <= iteration and not is_redone:
            yield record


def _is_ours(data: bytes) -> bool:
    return any(
        _parsed(payload).file_version.startswith(_VERSION) for _, payload in itertools.islice(complete_records(data), 1)
    )


def _parsed(payload: bytes) -> Any:
    """Return the event in a record. A damaged record counts as an empty event of step 0, which stays."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        return Event.FromString(payload)
    except DecodeError:
        return Event()


def complete_records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield every complete record of a file, and the serialized event in it."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, _ = _HEADER.unpack_from(data, at)
        end = at + _HEADER.size + length + _FOOTER.size
        if end > len(data):
            return
        yield data[at:end], data[at + _HEADER.size : end - _FOOTER.size]
        at = end
