"""Weights & Biases. The step of a row there is the number of a line, and `iteration` is the axis of its curves.

W&B drops rows of earlier steps in silence, so the number of the next line is what W&B really has: the last step of the
server or, offline, of the files, which lack the last rows of a process that was killed.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import wandb
from google.protobuf.message import DecodeError
from wandb.errors import AuthenticationError, UsageError
from wandb.proto.wandb_internal_pb2 import Record

from reprise.files import matching, read_regular
from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow

# The file of a run is framed as LevelDB's log: after the file's head, blocks of 32 KiB with parts of records, each
# with a checksum, its size and its kind (whole, first, middle, last).
_FILE_HEAD_BYTES, _BLOCK_BYTES, _PART_HEAD = 7, 32 << 10, struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4
_STEP = "_step"
_WAIT_S, _POLL_S = 60.0, 0.1


class WandbTracker(Tracker):
    """A run with our id. Offline, every launch adds a file, whose steps follow those of the file before.

    W&B keeps float64, NaN and infinity.
    """

    failures = (OSError, wandb.Error)
    refusals = (AuthenticationError, UsageError)

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: RemoteRun) -> int:
        if self._run is not None:
            self.close()
        place = Path(os.environ.get("WANDB_DIR") or run.folder)
        folders = [folder for folder in matching(place, "*wandb") if os.access(folder, os.R_OK | os.X_OK)]
        files = [file for folder in folders for file in matching(folder, f"*run-*-{run.id}/run-{run.id}.wandb")]
        _await_writers(files)
        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True, silent=True
        )
        self._run = wandb.init(
            dir=str(place),
            project=os.environ.get("WANDB_PROJECT") or run.project,
            id=run.id,
            name=run.name,
            config=dict(run.config),
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="iteration")
        self.place = self._run.url or str(place)
        if not self._run.offline:
            return int(self._run.starting_step)
        return max((last_step(read_regular(path)) for path in files), default=-1) + 1

    def send(self, rows: Sequence[TrackerRow]) -> None:
        for row in rows:
            members = {"iteration": row.iteration, "_timestamp": row.time, **row.figures, **row.texts}
            self._run.log(members, step=row.number, commit=True)

    def close(self) -> None:
        self._run.finish()
        self._run = None


def last_step(data: bytes) -> int:
    """Return the last step in the content of a run's file; -1 for none."""
    step = -1
    for record in records(data):
        if record.HasField("history"):
            step = max([step, *(int(item.value_json) for item in record.history.item if _STEP in item.nested_key)])
    return step


def records(data: bytes) -> Iterator[Record]:
    """Yield the complete records of a run's file."""
    at, payload = _FILE_HEAD_BYTES, b""
    while at + _PART_HEAD.size <= len(data):
        room = _BLOCK_BYTES - at % _BLOCK_BYTES
        if room < _PART_HEAD.size:
            at += room
            continue
        _, size, kind = _PART_HEAD.unpack_from(data, at)
        at += _PART_HEAD.size
        if kind == 0 or at + size > len(data):
            return
        payload += data[at : at + size]
        at += size
        if kind in (_WHOLE, _LAST):
            try:
                yield Record.FromString(payload)
            except DecodeError:
                return
            payload = b""


def _await_writers(files: Sequence[Path]) -> None:
    """Wait until no process writes these files: W&B's own outlives a process that was killed, and adds rows.

    Raises:
        TimeoutError: if one still does after a minute.
    """
    targets, end = {str(path.resolve()) for path in files}, time.monotonic() + _WAIT_S
    while targets and any(_opens(number, targets) for number in os.listdir("/proc") if number.isdigit()):
        if time.monotonic() > end:
            raise TimeoutError(f"a process of W&B still writes one of {', '.join(sorted(targets))}")
        time.sleep(_POLL_S)


def _opens(process: str, targets: set[str]) -> bool:
    try:
        links = [entry.path for entry in os.scandir(f"/proc/{process}/fd")]
    except OSError:  # of another user, or ended
        return False
    for link in links:
        try:
            if os.readlink(link) in targets:
                return True
        except OSError:
            continue
    return False
