"""Writes `metrics.jsonl`, the sink of every run."""

from __future__ import annotations

from collections.abc import Callable

from reprise.storage import Json
from trainer.metrics.json_lines import METRICS
from trainer.metrics.jsonl_file import JsonlFile, cut_after
from trainer.metrics.sink import MetricSink, RunPosition


class JsonlSink(MetricSink):
    """Writes a line with a timestamp per record. Lines from abandoned iterations move to a side file.

    Args:
        clock: Returns the Unix time for each record.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def start(self, position: RunPosition) -> None:
        """Truncate the file after the position, and open it.

        Raises:
            OSError: The run's folder cannot be written.
        """
        path = position.folder / METRICS
        cut_after(path, position.iteration, owes_evaluation=position.owes_evaluation, files=position.files)
        self._lines = JsonlFile(path, self._clock)
        # The first checkpoint makes the records durable. Make the file's name durable too.
        position.files.sync_folder(position.folder)

    def write(self, record: Json) -> None:
        self._lines.add(record)

    def sync(self) -> None:
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()
