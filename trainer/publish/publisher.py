"""Sends a run's log to a tracker: one remote run per branch, with a cursor recording the tracker's progress."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from reprise.errors import DataError
from reprise.format import Branch, Journal
from reprise.storage import (
    FILE_SYSTEM,
    FolderLock,
    Json,
    exists,
    json_file,
    open_regular,
    read_regular,
    replace_file,
)
from trainer.config.compose import read_resolved
from trainer.config.saved import flattened
from trainer.metrics.json_lines import METRICS, record_of
from trainer.metrics.publish_sink import PUBLISH
from trainer.publish.tracker import RemoteRun, Tracker, row_of

_log = logging.getLogger(__name__)

_BATCH = 1000
_FIRST_ATTEMPTS = 5


@dataclass(slots=True)
class Cursor:
    """A tracker's progress through a branch.

    Args:
        id: The remote run's id.
        lines: How many lines the tracker has.
        last: The last sent iteration per event. Training lines have an empty event. Each event's lines are in iteration
            order.
    """

    id: str
    lines: int = 0
    last: dict[str, int] = field(default_factory=dict)

    def passes(self, record: Json) -> bool:
        """Return whether a record is new, and mark it as sent."""
        event, iteration = str(record.get("event", "")), record["iteration"]
        is_new: bool = iteration > self.last.get(event, -1)
        if is_new:
            self.last[event] = iteration
        return is_new


class LogFollower:
    """Reads `metrics.jsonl` while a run appends to it and truncates it, which replaces the file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._file: BinaryIO | None = None  # stays open, so that no later file gets its number

    def records(self) -> Iterator[Json]:
        """Yield the records added since the last call, or all records after a truncation. An unfinished line waits."""
        if self._file is not None and not (exists(self._path) and _is_at(self._path, self._file)):
            self.close()
        if self._file is None and exists(self._path):
            self._file = os.fdopen(open_regular(self._path), "rb")
        while self._file is not None:
            at, line = self._file.tell(), self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(at)
                return
            if record := record_of(line):
                yield record

    def close(self) -> None:
        """Close the file. The next call reads all records."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Publisher:
    """Sends a run's log to a tracker.

    A run that continues from an earlier checkpoint starts a new branch. Each branch gets its own remote run, with all
    lines from the first iteration on, because trackers cannot take lines back. If lines are repeated after a kill, the
    values sent first stay.
    """

    def __init__(self, run: Path, name: str, tracker: Tracker, *, project: str, title: str) -> None:
        """Lock a run's cursors until `close`.

        Args:
            run: The run's folder.
            name: The tracker's name.
            project: The tracker's project.
            title: The remote run's display name.

        Raises:
            LockError: Another process already publishes the run to this tracker.
            OSError: A file cannot be read or written.
        """
        self._run, self._tracker, self._project, self._title = run, tracker, project, title
        self.folder = run / PUBLISH / name
        self._lock = FolderLock(self.folder, secrets.token_hex(4), another="another tracker")
        self._lock.acquire()
        self._log = LogFollower(run)
        self.reopen()

    def reopen(self) -> None:
        """Restart from the stored cursor, after a failure."""
        self._number, self._is_open, self._cursor = -1, False, Cursor("")
        self._log.close()

    @property
    def remote_id(self) -> str:
        """The remote run's id for the current branch. Empty before its first line."""
        return self._cursor.id if self._cursor.lines else ""

    def send(self) -> None:
        """Send all new lines to the tracker.

        Raises:
            DataError: A cursor is damaged.
        """
        branches = read_branches(self._run)
        number = max(len(branches) - 1, 0)
        if number != self._number:
            self.finish()
            self.reopen()
            self._number, self._cursor = number, self._read(number, branches)
        records = filter(self._cursor.passes, self._log.records())
        while batch := list(islice(records, _BATCH)):
            if not self._is_open:
                if not exists(self._path(self._number)):  # a failed first attempt keeps the id
                    self._store(Cursor(self._cursor.id))
                self._tracker.open(self._remote(branches))
                self._is_open = True
            self._tracker.send([row_of(self._cursor.lines + index, record) for index, record in enumerate(batch)])
            self._cursor.lines += len(batch)
            if self._tracker.is_durable:
                self._store(self._cursor)

    def finish(self) -> None:
        """Flush pending lines to the tracker, and close its run."""
        if self._is_open:
            self._is_open = False
            self._tracker.close()
            self._store(self._cursor)

    def close(self) -> None:
        """Release the lock, so that another process can publish the run."""
        self._log.close()
        self._lock.release()

    def _path(self, number: int) -> Path:
        return self.folder / f"cursor-{number}.json"

    def _read(self, number: int, branches: Sequence[Branch]) -> Cursor:
        path = self._path(number)
        if exists(path):
            try:
                return Cursor(**json_file.read(path))
            except TypeError as error:
                raise DataError("A published run's cursor is damaged", where=path, found=error) from error
        first = branches[0].id if branches else secrets.token_hex(8)
        return Cursor(f"{self._read(0, branches).id}-{number}" if number else first)

    def _store(self, cursor: Cursor) -> None:
        replace_file(FILE_SYSTEM, self._path(self._number), json.dumps(asdict(cursor)).encode())

    def _remote(self, branches: Sequence[Branch]) -> RemoteRun:
        config, title = read_config(self._run), self._title
        if self._number:
            began_at, parent = branches[self._number].began_at, self._read(self._number - 1, branches).id
            config |= {"reprise.forked_from": parent, "reprise.forked_at": began_at}
            title = f"{title} from {began_at}"
        _log.info("the remote run is %s", self._cursor.id)
        return RemoteRun(self._cursor.id, title, self._project, config, self.folder)


def read_config(run: Path) -> Json:
    """Return a run's configuration by dotted keys, without values from environment variables."""
    sections, environment_keys = read_resolved(run / "config.yaml")
    return {key: value for key, value in flattened(sections).items() if key not in environment_keys}


def read_branches(run: Path) -> Sequence[Branch]:
    """Return a run's branches, or none without a `run.json`. The first branch has the run's id.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = run / "run.json"
    try:
        return Journal.from_bytes(read_regular(path), where=path).lineage.branches
    except FileNotFoundError:
        return ()


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Return whether an open file is still the one at a path."""
    return os.path.samestat(os.stat(path), os.fstat(file.fileno()))


def publish(publisher: Publisher, tracker: Tracker, pause: Callable[[float], bool]) -> Exception | None:
    """Send lines as a run writes them, until `pause` returns False, and then the last ones.

    After a failure the lines wait for the next attempt. A tracker that takes nothing in the first attempts is given up:
    a key or a name may be wrong.

    Args:
        pause: Waits for the given multiple of the polling interval, and returns whether to continue.

    Returns:
        The last attempt's error, or None.
    """
    failures, attempts, continues = 0, _FIRST_ATTEMPTS, True
    while continues:
        continues = pause(min(2.0**failures, 2.0**6))
        try:
            publisher.send()
            if not continues:
                publisher.finish()
            if failures:
                _log.info("the tracker takes lines again")
            failures, attempts = 0, sys.maxsize
        except tracker.failures as error:
            failures += 1
            if not continues or failures == attempts:
                return error
            if failures == 1:
                _log.warning("the tracker takes no lines, which wait: %r", error)
            publisher.reopen()
    return None
