"""Trackio, in its local database. `trackio sync` copies it to a Space with the same keys.

Each row has a key (`log_id`), and a repeated row is ignored.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage

from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow


class TrackioTracker(Tracker):
    """A Trackio run with our id. Each batch is a transaction.

    Trackio stores float64, with NaN and infinity as the strings `NaN`, `Infinity` and `-Infinity`.
    """

    failures = (OSError, sqlite3.Error)

    def open(self, run: RemoteRun) -> None:
        self._run, self._project = run, os.environ.get("TRACKIO_PROJECT") or run.project

    def send(self, rows: Sequence[TrackerRow]) -> None:
        is_first = rows[0].number == 0
        SQLiteStorage.bulk_log(
            self._project,
            self._run.name,
            [{**row.figures, **row.texts} for row in rows],
            [row.iteration for row in rows],
            [datetime.fromtimestamp(row.time, UTC).isoformat() for row in rows],
            config=dict(self._run.config) if is_first else None,
            log_ids=[f"{self._run.id}:{row.number}" for row in rows],
            run_id=self._run.id,
        )

    def close(self) -> None:
        self._run = None
