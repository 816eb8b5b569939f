"""The sink that lets a process beside the run send its log to a tracker: `logging.publish`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from reprise.storage import make_folders
from trainer.metrics.sink import MetricRecord, MetricSink, RunPosition

_log = logging.getLogger(__name__)

PUBLISH = "publish"  # the folder of trackers in that of the run
# It needs no device, and no more than a thread.
_VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class PublishSink(MetricSink):
    """A process that follows `metrics.jsonl`, in a session of its own, with the least priority and a log of its own.

    It reads what the run writes anyway, so training never waits for it. It ends after the run, when the pipe that is
    its input is closed, also by a kill.
    """

    def __init__(self, tracker: str) -> None:
        self._tracker = tracker
        self._process: subprocess.Popen[bytes] | None = None
        self._output = Path()

    def start(self, position: RunPosition) -> None:
        """Start the process.

        Raises:
            OSError: if it cannot be started.
        """
        folder = position.folder / PUBLISH / self._tracker
        make_folders(position.files, folder)
        command = [sys.executable, "-m", "reprise", "publish", str(position.folder), "--to", self._tracker]
        self._output = folder / "publish.log"
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--follow", "--until-input-ends"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **_VARIABLES},
            )

    def write(self, record: MetricRecord) -> None:
        if self._process is not None and self._process.poll() is not None:
            _log.warning(
                "the process that sends the metrics to %s has ended with status %d, the run goes on without: %s",
                self._tracker,
                self._process.returncode,
                self._output,
            )
            self._process = None

    def close(self) -> None:
        """Close its input: it sends what is left, and nobody waits for it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
