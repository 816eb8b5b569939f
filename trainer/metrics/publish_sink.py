"""The sink behind `logging.publish`: a separate process sends the run's log to a tracker."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from reprise.storage import FILE_SYSTEM, Json, make_folders
from trainer.metrics.sink import MetricSink

_log = logging.getLogger(__name__)

PUBLISH = "publish"  # the trackers' folder inside the run's folder
# The process needs no device and only one thread.
_VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class PublishSink(MetricSink):
    """A process that follows `metrics.jsonl` in its own session, with its own log.

    It reads what the run writes anyway, so training never waits for it. Its standard input is a pipe from the run: it
    exits after the run closes the pipe, also if the run is killed.
    """

    def __init__(self, tracker: str) -> None:
        self.name = tracker
        self._process: subprocess.Popen[bytes] | None = None
        self._output = Path()

    def start(self, folder: Path, iteration: int) -> None:
        """Start the process.

        Raises:
            OSError: The process cannot be started.
        """
        self._output = folder / PUBLISH / self.name / "publish.log"
        make_folders(FILE_SYSTEM, self._output.parent)
        command = [sys.executable, "-m", "reprise", "publish", str(folder), "--to", self.name]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--follow", "--until-input-ends"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **_VARIABLES},
            )

    def write(self, record: Json) -> None:
        if self._process is not None and self._process.poll() is not None:
            _log.warning(
                "the process sending metrics to %s has ended with status %d, and the run continues without it: %s",
                self.name,
                self._process.returncode,
                self._output,
            )
            self._process = None

    def close(self) -> None:
        """Close the process's input. It sends the remaining lines, and the run does not wait."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
