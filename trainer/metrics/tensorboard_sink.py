"""The TensorBoard sink: curves and texts in event files inside the run's folder."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.storage import Files, matching
from trainer.metrics.sink import MetricRecord, MetricSink, RunPosition

if TYPE_CHECKING:
    from trainer.metrics.event_file import EventFile

_log = logging.getLogger(__name__)

_EVENTS = "tensorboard"  # the event file folder
# TensorBoard sorts tag groups by name. These names put the losses first.
_TAGS = {
    "train/loss": "loss/train",
    "valid/loss": "loss/valid",
    "valid/ema_loss": "loss/valid_ema",
    "checkpoint/blocked_seconds": "train/blocked_seconds",
}
# TensorBoard reads a folder's files in name order. Each name starts with the file's creation time in seconds.
_NAME = re.compile(r"(events\.out\.tfevents\.)(\d{10})(\..*)")


class TensorboardSink(MetricSink):
    """Writes event files. After a disk error it starts a new file.

    A resume marks its first iteration. At each curve's next point TensorBoard then drops the abandoned points, but
    other readers still see them.
    """

    def __init__(self) -> None:
        self._folder = Path(_EVENTS)
        self._file: EventFile | None = None
        self._purge_step = 1
        self._has_lost_points = False

    def start(self, position: RunPosition) -> None:
        self._folder, self._purge_step = position.folder / _EVENTS, position.iteration + 1
        self._plot(lambda: put_before(self._folder, int(time.time()), position.files), position.iteration)

    def write(self, record: MetricRecord) -> None:
        if record.curves or record.texts:
            self._plot(lambda: self._add(record), record.iteration)

    def close(self) -> None:
        if self._file is not None:
            self._plot(self._file.close, self._purge_step)

    def _add(self, record: MetricRecord) -> None:
        from trainer.metrics.event_file import EventFile, event, point, verbatim

        if self._file is None:  # created with the first point, so that a run without points leaves no file
            self._folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
            self._file = EventFile(self._folder / name, purge_step=self._purge_step)
        values = [point(_TAGS.get(tag, tag), value) for tag, value in record.curves.items()]
        values += [verbatim(tag, text) for tag, text in record.texts.items()]
        self._file.write([event(record.iteration, values)])

    def _plot(self, call: Callable[[], None], iteration: int) -> None:
        """Write points. After a disk error the next point starts a new file."""
        try:
            call()
            self._has_lost_points = False
        except OSError as error:
            if not self._has_lost_points:
                _log.error("%s is missing points: %s", self._folder, error)
            self._has_lost_points = True
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._file, self._purge_step = None, iteration + 1


def put_before(folder: Path, second: int, files: Files) -> None:
    """Rename event files where necessary, so that a file created at `second` or later sorts after all of them.

    Two launches may share a second, and another host's clock may lag. The files keep their order, even if the process
    is killed during the renames.

    Args:
        second: Unix time in seconds, as in file names.

    Raises:
        OSError: The folder cannot be read or written.
    """
    names = [path.name for path in matching(folder, "events.out.tfevents.*")]
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    for last, match in zip(range(second - len(matches), second), matches, strict=True):
        if int(match[2]) > last:
            files.rename(folder / match[0], folder / f"{match[1]}{last:010d}{match[3]}")
