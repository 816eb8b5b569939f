"""Writes TensorBoard event files: serialized events, each framed as a TFRecord.

`torch.utils.tensorboard` and `tensorboard.summary` can write them too, but import fsspec, a TensorFlow stub and, where
installed, boto3, which takes 0.5 to 1 s. A record holds the message length (uint64), the length's checksum, the message
and its checksum (https://www.tensorflow.org/tutorials/load_data/tfrecord).
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from reprise.storage import matching

_POLYNOMIAL = 0x82F63B78  # the CRC-32C polynomial, bits reversed
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


class EventFile:
    """A new event file in a folder, open for appending.

    TensorBoard reads a folder's files in name order. Each name starts with a second: the current one, or the one after
    the last file's, because two launches may share a second, and another host's clock may lag.

    Args:
        folder: The folder, created if missing.
        purge_step: The step from which TensorBoard drops points in earlier files.

    Raises:
        OSError: The file cannot be created or written.
    """

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        folder.mkdir(exist_ok=True)
        names = [_NAME.match(path.name) for path in matching(folder, "events.out.tfevents.*")]
        second = max([int(time.time()), *(int(name[1]) + 1 for name in names if name)])
        path = folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = path.open("xb")
        version = Event(wall_time=time.time(), file_version="brain.Event:2")
        start = SessionLog(status=SessionLog.START)
        try:
            self.write([version, Event(wall_time=time.time(), step=purge_step, session_log=start)])
        except OSError:  # the next attempt has its own file
            with suppress(OSError):
                self._file.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, events: Iterable[Event]) -> None:
        """Append events and flush them to the operating system."""
        self._file.write(b"".join(_record(event.SerializeToString()) for event in events))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def event(iteration: int, values: Sequence[Summary.Value]) -> Event:
    """Return an event of now, holding the given points at a step."""
    return Event(step=iteration, wall_time=time.time(), summary=Summary(value=values))


def point(tag: str, value: float) -> Summary.Value:
    """Return a curve point in single precision, which every event file reader supports."""
    return Summary.Value(tag=tag, simple_value=value)


def _record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + _checksum(length) + message + _checksum(message)


def _checksum(data: bytes) -> bytes:
    """Return TFRecord's masked CRC-32C."""
    remainders, crc = _remainders(), 0xFFFFFFFF
    for byte in data:
        crc = remainders[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _remainders() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(value >> 1) ^ (_POLYNOMIAL if value & 1 else 0) for value in table]
    return table
