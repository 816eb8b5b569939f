"""Weights & Biases. A row's step there is its line number, and curves use `iteration` as their axis.

W&B silently drops rows for earlier steps, so sending a row twice has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import wandb

from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow


class WandbTracker(Tracker):
    """A W&B run with our id. Offline, every launch adds a file.

    W&B stores float64, NaN and infinity.
    """

    failures = (OSError, wandb.Error)
    is_durable = False

    def open(self, run: RemoteRun) -> None:
        if self._run is not None:
            self.close()
        place = os.environ.get("WANDB_DIR") or str(run.folder)
        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True, silent=True
        )
        self._run = wandb.init(
            dir=place,
            project=os.environ.get("WANDB_PROJECT") or run.project,
            id=run.id,
            name=run.name,
            config=dict(run.config),
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="iteration")
        self.place = self._run.url or place

    def send(self, rows: Sequence[TrackerRow]) -> None:
        for row in rows:
            members = {"iteration": row.iteration, "_timestamp": row.time, **row.figures, **row.texts}
            self._run.log(members, step=row.number, commit=True)

    def close(self) -> None:
        self._run.finish()
        self._run = None
