"""Cuts TensorBoard's event files when a run resumes from an earlier iteration.

A new file begins with an event that makes TensorBoard's reader in Python drop later points. Its data server, which
`tensorboard` uses by default, ignores that event and shows the abandoned branch of a curve until the curve's next point
arrives; so does the former reader with texts. Their points are therefore removed, from the end of the files.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from reprise.storage import Files, matching, open_regular, temporary_of

# A record is its length and a checksum of that, its bytes, and a checksum of those, little-endian: TFRecord, in
# TensorFlow's lib/io/record_writer.h. Only the first checksum is looked at: TensorBoard's function for them is slow.
_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")
# Every file begins with an event that says so: kVersionPrefix in TensorFlow's core/util/events_writer.h.
_VERSION = "brain.Event:"
_FIRST_BYTES = 4096  # of a file, with the first event
_TAIL_BYTES = 1 << 18  # of the events that a start looks at
_TRAINING = "train/"  # the curves with a point of every iteration
# TensorBoard reads the files of a folder in the order of their names, which begin with the second of their creation.
_NAME = re.compile(r"(events\.out\.tfevents\.)(\d{10})(\..*)")


def cut_events(folder: Path, iteration: int, *, files: Files, but: str | None = None) -> None:
    """Remove events after `iteration`, and truncated records, from the event files of a folder.

    A file is read from its end, back to a point of training that stays: no event before it is of a later iteration.
    A process killed in here leaves a file unchanged, cut, or with a damaged record, which the next cut removes with all
    that follows it. An older, suspended process still adds its points when it continues, because TensorBoard's writer
    opens the file by name for every write. A file without TensorBoard's version event at its begin is left alone.

    Args:
        folder: TensorBoard's log folder; it may be missing.
        iteration: the last iteration to keep.
        but: tag of a curve whose point of `iteration` is removed too.

    Raises:
        OSError: the folder cannot be read or written.
    """
    for path in matching(folder, "events.out.tfevents.*"):
        files.remove_file(temporary_of(path))  # of a former version
        with os.fdopen(open_regular(path), "rb") as file:
            if not _is_ours(file.read(_FIRST_BYTES)):
                continue
            begin, tail = _tail(file, iteration)
        retained = b"".join(_kept(tail, iteration, but))
        if retained != tail:
            _overwrite(path, begin, tail, retained, files)


def _tail(file: BinaryIO, iteration: int) -> tuple[int, bytes]:
    """Return the last records of a file, with a point of training up to `iteration` or all, and their first byte."""
    size, least_bytes = file.seek(0, os.SEEK_END), _TAIL_BYTES
    while True:
        begin = max(0, size - least_bytes)
        file.seek(begin)
        data = file.read()
        at = next((place for place in range(len(data)) if _is_header(data, place)), 0) if begin else 0
        step = _first_training_step(data[at:]) if begin else None
        if begin == 0 or (step is not None and step <= iteration):
            return begin + at, data[at:]
        least_bytes *= 4


def _first_training_step(data: bytes) -> int | None:
    """Return the iteration of the first point of training, which are in order; None without one."""
    events = (_parsed(payload) for _, payload in complete_records(data))
    return next((e.step for e in events if any(value.tag.startswith(_TRAINING) for value in e.summary.value)), None)


def _is_header(data: bytes, at: int) -> bool:
    """Return whether a record begins at a byte, by the checksum of its length."""
    from tensorboard.summary.writer.record_writer import masked_crc32c

    begin = data[at : at + _HEADER.size]
    is_plausible = len(begin) == _HEADER.size and begin[4:8] == bytes(4)
    return is_plausible and _HEADER.unpack(begin)[1] == masked_crc32c(begin[:8])


def _overwrite(path: Path, begin: int, tail: bytes, retained: bytes, files: Files) -> None:
    """Replace the last records of a file, which begin at byte `begin`."""
    equal = next((at for at, (a, b) in enumerate(zip(tail, retained, strict=False)) if a != b), len(retained))
    with path.open("r+b", buffering=0) as file:
        files.write(file.fileno(), [memoryview(retained)[equal:]], offset=begin + equal)
        file.truncate(begin + len(retained))
        files.sync(file.fileno())


def put_before(folder: Path, second: int, files: Files) -> None:
    """Rename event files, if necessary, so that a file created at `second` or later sorts after all of them.

    Two launches may share a second, and the clock of another host may lag. The files keep their order, even if the
    process is killed in here.

    Args:
        second: Unix time, as in the file names.

    Raises:
        OSError: the folder cannot be read or written.
    """
    names = [path.name for path in matching(folder, "events.out.tfevents.*")]
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
    """Yield the complete records of a file up to the first damaged one, and the serialized event in each."""
    at = 0
    while _is_header(data, at):
        length, _ = _HEADER.unpack_from(data, at)
        end = at + _HEADER.size + length + _FOOTER.size
        if end > len(data):
            return
        yield data[at:end], data[at + _HEADER.size : end - _FOOTER.size]
        at = end
