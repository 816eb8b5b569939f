"""The sink for TensorBoard: curves and texts in event files of the run's folder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.metrics.sink import VALID_LOSS, MetricRecord, MetricSink, RunPosition
from trainer.metrics.tensorboard_files import cut_events, put_before

_log = logging.getLogger(__name__)

_EVENTS = "tensorboard"  # the folder of the event files


class TensorboardSink(MetricSink):
    """Event files, without points of abandoned iterations. After a disk error it starts a new file."""

    def __init__(self) -> None:
        self._folder = Path(_EVENTS)
        self._writer: Any = None
        self._purge_step = 1
        self._has_lost_points = False
        self._lock = threading.Lock()  # a save syncs while training writes

    def rewind(self, position: RunPosition) -> None:
        """Cut the event files, even if the run has turned them off."""
        self._folder = position.folder / _EVENTS
        but = VALID_LOSS if position.owes_evaluation else None
        files = position.files
        self._plot(lambda: cut_events(self._folder, position.iteration, but=but, files=files), position.iteration)
        self._plot(lambda: put_before(self._folder, int(time.time()), files), position.iteration)

    def start(self, position: RunPosition) -> None:
        self._purge_step = position.iteration + 1

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
