"""SwanLab. A curve there drops steps up to its last one in silence, so sending a run again adds what it lacks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests
import swanlab
from swanlab.exceptions import AuthenticationError

from reprise.files import matching
from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow

# SwanLab would describe the process that publishes, not the run.
_PROBES_OFF = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)


class SwanlabTracker(Tracker):
    """A run with our id, to which every launch sends all lines: the server takes those that it lacks.

    Without a server a launch writes a folder anew, and removes those of earlier launches once it is complete: a process
    that is killed leaves an empty one. SwanLab keeps float64, NaN and infinity, and has times of its own.
    """

    failures = (OSError, requests.RequestException, AuthenticationError)
    refusals = (AuthenticationError,)

    def __init__(self) -> None:
        self._run: Any = None
        self._folder = Path()

    def open(self, run: RemoteRun) -> int:
        if self._run is not None:
            self._run.finish()
        self._folder = run.folder / run.id
        self._folder.mkdir(exist_ok=True)
        self.place = str(self._folder)
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=str(self._folder),
            config=dict(run.config),
            settings=swanlab.Settings(interactive=False, probe=_PROBES_OFF, terminal={"proxy_type": "none"}),
        )
        return 0

    def send(self, rows: Sequence[TrackerRow]) -> None:
        for row in rows:
            texts = {name: swanlab.Text(text) for name, text in row.texts.items()}
            self._run.log({**row.figures, **texts}, step=row.iteration)

    def close(self) -> None:
        is_local, written = self._run.mode in ("local", "offline"), Path(self._run.dir)
        self._run.finish()
        self._run = None
        for folder in matching(self._folder, "run-*") if is_local else ():
            if folder.resolve() not in (written.resolve(), *written.resolve().parents):
                shutil.rmtree(folder)
