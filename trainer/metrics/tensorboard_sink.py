"""The sink for TensorBoard: curves and texts in event files of the run's folder."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reprise.storage import Files, matching
from trainer.metrics.sink import MetricRecord, MetricSink, RunPosition

_log = logging.getLogger(__name__)

_EVENTS = "tensorboard"  # the folder of the event files
# TensorBoard reads the files of a folder in the order of their names, which begin with the second of their creation.
_NAME = re.compile(r"(events\.out\.tfevents\.)(\d{10})(\..*)")


class TensorboardSink(MetricSink):
    """Event files. After a disk error it starts a new file.

    A resume marks its first iteration, at which TensorBoard drops the points of abandoned ones: of each curve at its
    next point. Other readers of the files see them.
    """

    def __init__(self) -> None:
        self._folder = Path(_EVENTS)
        self._writer: Any = None
        self._purge_step = 1
        self._has_lost_points = False
        self._lock = threading.Lock()  # a save syncs while training writes

    def start(self, position: RunPosition) -> None:
        self._folder, self._purge_step = position.folder / _EVENTS, position.iteration + 1
        self._plot(lambda: put_before(self._folder, int(time.time()), position.files), position.iteration)

    def write(self, record: MetricRecord) -> None:
        if record.curves or record.texts:
            self._plot(lambda: self._add(record), record.iteration)

    def sync(self) -> None:
        if self._writer is not None:
            self._plot(self._flush, self._purge_step)

    def close(self) -> None:
        if self._writer is not None:
            self._plot(lambda: self._writer.close(), self._purge_step)

    def _add(self, record: MetricRecord) -> None:
        for tag, value in record.curves.items():
            self._opened_writer().add_scalar(tag, value, record.iteration)
        for tag, text in record.texts.items():
            indented = "    " + text.replace("\n", "\n    ")  # which Markdown shows as it is
            self._opened_writer().add_text(tag, indented, record.iteration)

    def _flush(self) -> None:
        if self._writer is not None:  # still, as another thread may have dropped it
            self._writer.flush()

    def _opened_writer(self) -> Any:
        if self._writer is None:  # made with the first point: a run that does nothing leaves no file
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        return self._writer

    def _plot(self, call: Callable[[], None], iteration: int) -> None:
        """Call TensorBoard; after a disk error the next point starts a new file."""
        with self._lock:
            try:
                call()
                self._has_lost_points = False
            except OSError as error:
                if not self._has_lost_points:
                    _log.error("%s lacks points: %s", self._folder, error)
                self._has_lost_points = True
                self._writer, self._purge_step = None, iteration + 1


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
