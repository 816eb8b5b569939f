"""SwanLab. Its curves silently drop steps up to their last, so sending a row twice has no effect."""

from __future__ import annotations

from collections.abc import Sequence

import requests
import swanlab
from swanlab.exceptions import AuthenticationError

from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow

# SwanLab would describe the publishing process rather than the run.
_PROBES_OFF = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)


class SwanlabTracker(Tracker):
    """A SwanLab run with our id. Without a server, every launch adds a folder.

    SwanLab stores float64, NaN and infinity, and its own timestamps.
    """

    is_durable = False

    failures = (OSError, requests.RequestException, AuthenticationError)

    def open(self, run: RemoteRun) -> None:
        if self._run is not None:
            self._run.finish()
        folder = run.folder / run.id
        folder.mkdir(exist_ok=True)
        self.place = str(folder)
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=self.place,
            config=dict(run.config),
            settings=swanlab.Settings(interactive=False, probe=_PROBES_OFF, terminal={"proxy_type": "none"}),
        )

    def send(self, rows: Sequence[TrackerRow]) -> None:
        for row in rows:
            texts = {name: swanlab.Text(text) for name, text in row.texts.items()}
            self._run.log({**row.figures, **texts}, step=row.iteration)

    def close(self) -> None:
        self._run.finish()
        self._run = None
