"""Truncates `metrics.jsonl` and appends to it. Each line is a JSON object."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from reprise.storage import FILE_SYSTEM, Json, dumps, exists, temporary_of
from trainer.metrics.json_lines import record_of, tail, time_of
from trainer.metrics.sink import MetricSink

_log = logging.getLogger(__name__)

_SAVES = ("save", "local_save")  # the events for saves that a run can resume from


class JsonlFile(MetricSink):
    """A JSON-lines file, open for appending. If a write fails, lines stay in memory until the disk works again.

    Only a single thread may add lines. Other threads may call `sync` without blocking that thread on the disk.

    Args:
        clock: Returns the Unix time for each line.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.name, self._path, self._clock = path.name, path, clock
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._waiting = bytearray()
        self._lock = threading.Lock()  # guards the waiting lines
        self._syncing = threading.Lock()  # guards the descriptor, except for writes
        self._is_closed = False
        self._has_failed = False

    def write(self, record: Json) -> None:
        """Append an object and its time as a line. NaN and infinity become null."""
        line = f"{dumps({**record, 'time': self._clock()})}\n".encode()
        with self._lock:
            self._waiting += line
        self._try(self._flush)

    def sync(self) -> None:
        """Make all lines durable. Does nothing once the file is closed."""
        with self._syncing:
            if not self._is_closed:
                self._try(self._flush, lambda: os.fsync(self._descriptor))

    def close(self) -> None:
        """Make all lines durable, because a pending save may still commit, and close the file."""
        with self._syncing:
            self._try(self._flush, lambda: os.fsync(self._descriptor))
            if self._waiting:
                _log.error("%s is missing its last %d bytes", self._path, len(self._waiting))
            self._is_closed = True
            os.close(self._descriptor)

    def _flush(self) -> None:
        with self._lock:
            while self._waiting:
                count = os.write(self._descriptor, self._waiting)
                del self._waiting[:count]

    def _try(self, *calls: Callable[[], None]) -> None:
        try:
            for call in calls:
                call()
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _log.error("%s cannot be written, and its lines wait in memory: %s", self._path, error)
            self._has_failed = True


def cut_after(path: Path, iteration: int, *, owes_evaluation: bool = False) -> None:
    """Move lines after `iteration`, and truncated lines, to `metrics.abandoned-k.jsonl`.

    Reads the file from its end, back to a training line that stays: no line before it belongs to a later iteration.
    Both new files are complete under temporary names before the shortened one replaces `path`, and only then is the
    side file named. So if the process is killed, the shortened file's temporary name tells whether the cut was made,
    and the next call discards both files or names the side file. Truncation replaces the file with a new one, so if an
    older, suspended process continues, it appends to the unlinked file.

    Args:
        owes_evaluation: Also move the evaluation at `iteration`, because it will run again.
    """
    if not exists(path):
        return
    shortened, moved = temporary_of(path), path.with_name(f".{path.name}.moved")
    if exists(moved) and not exists(shortened):
        _name_side_file(path, moved)
    for file in (moved, shortened):  # in this order: moved lines alone would mean that the cut was made
        FILE_SYSTEM.remove(file)
    retained, cut, size = list[bytes](), list[bytes](), 0
    for line in tail(path):
        record = record_of(line) or {"iteration": iteration + 1}
        is_owed = owes_evaluation and record["iteration"] == iteration and record.get("event") == "evaluation"
        is_cut = is_owed or record["iteration"] > iteration
        (cut if is_cut else retained).append(line)
        size += len(line)
        if not is_cut and "event" not in record:
            break
    if cut:
        shutil.copyfile(path, shortened)
        with shortened.open("r+b") as new:
            new.truncate(new.seek(-size, os.SEEK_END))
            new.writelines(reversed(retained))
            new.flush()
            FILE_SYSTEM.sync(new.fileno())
        FILE_SYSTEM.write_whole(moved, b"".join(reversed(cut)))
        FILE_SYSTEM.sync_folder(path.parent)
        FILE_SYSTEM.rename(shortened, path)
        FILE_SYSTEM.sync_folder(path.parent)
        _name_side_file(path, moved)


def _name_side_file(path: Path, moved: Path) -> None:
    FILE_SYSTEM.rename(moved, _side_path(path, _last_number(path) + 1))
    FILE_SYSTEM.sync_folder(path.parent)


def newest_side_file(path: Path) -> str | None:
    """Return the name of the newest side file with lines moved from `path`, or None."""
    number = _last_number(path)
    return _side_path(path, number).name if number else None


def _last_number(path: Path) -> int:
    """Return the newest side file's number, or 0 if none exists."""
    number = 0
    while exists(_side_path(path, number + 1)):
        number += 1
    return number


def _side_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.abandoned-{number}.jsonl")


def last_recorded_time(path: Path) -> float:
    """Return the Unix time in the last complete line of `path`, or 0 if there is no line or no valid time."""
    return next((time_of(record) or 0.0 for record in map(record_of, tail(path)) if record), 0.0)


def last_saved_iteration(path: Path) -> int | None:
    """Return the newest iteration that `path` records as saved, in the shared folder or on hosts, or None."""
    last: int | None = None
    for line in tail(path):
        if last is None and b"save" not in line:
            continue
        record = record_of(line) or {}
        if record.get("event") in _SAVES:
            last = max(record["iteration"], last or 0)
        elif record and "event" not in record and last is not None and record["iteration"] <= last:
            break
    return last
