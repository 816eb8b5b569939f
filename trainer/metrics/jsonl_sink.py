"""Writes `metrics.jsonl`, the sink of every run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from pathlib import Path

from reprise.errors import count_of
from trainer.metrics.json_lines import METRICS
from trainer.metrics.jsonl_file import JsonlFile, cut_after
from trainer.metrics.sink import MetricRecord, MetricSink, RunPosition

_log = logging.getLogger(__name__)


class JsonlSink(MetricSink):
    """Writes a line with a timestamp per record. Lines from abandoned iterations move to a side file.

    Args:
        clock: Returns the Unix time for each record.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines: JsonlFile | None = None

    def start(self, position: RunPosition) -> None:
        """Truncate the file after the position, and open it.

        Raises:
            OSError: The run's folder cannot be written.
        """
        path = position.folder / METRICS
        recorded = cut_after(path, position.iteration, owes_evaluation=position.owes_evaluation, files=position.files)
        self._lines = JsonlFile(path)
        # The first checkpoint makes the records durable. Make the file's name durable too.
        position.files.sync_folder(position.folder)
        first = min(recorded, default=position.iteration + 1 if position.began_elsewhere else 1)
        _report_gap(path, recorded, first, position.iteration)

    def write(self, record: MetricRecord) -> None:
        if record.members and self._lines is not None:
            self._lines.add({**record.members, "time": self._clock()})

    def sync(self) -> None:
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _report_gap(path: Path, recorded: Set[int], first: int, last: int) -> None:
    """Log a warning if iterations between `first` and `last` have no line."""
    count = last + 1 - first - len(recorded)
    if count > 0:
        lacks = [number for number in range(first, last + 1) if number not in recorded]
        _log.warning(
            f"{path} has no line for {count_of(count, 'iteration')} of this run, the first {lacks[0]}, the last "
            f"{lacks[-1]}: it was deleted or cut"
        )
