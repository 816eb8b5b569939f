"""Sends a run to a tracker: a remote run for each branch, each line of the log once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from reprise.errors import DataError, LockError
from reprise.files import Files, make_folders
from reprise.json_file import Json
from trainer.metrics.publish_sink import PUBLISH
from trainer.publish.journal import Journal, JournalHead
from trainer.publish.log_reader import LogLine, LogReader
from trainer.publish.tracker import RemoteRun, Tracker, row_of

_log = logging.getLogger(__name__)

_JOURNAL = re.compile(r"branch-(\d+)\.jsonl")
_BATCH = 1000


class Publisher:
    """What one tracker has of a run, and lacks.

    A rewind of the run to an earlier checkpoint begins a branch. Once it logs other values than the branch before, it
    gets a remote run of its own, with all lines from the first iteration on: trackers cannot take lines back. Lines
    that are trained again without a rewind, after a kill, keep the values that were sent first.
    """

    def __init__(
        self,
        run: Path,
        name: str,
        tracker: Tracker,
        *,
        project: str,
        title: str,
        config: Callable[[Path], Mapping[str, object]],
        lineage: Callable[[Path], Sequence[str]],
        files: Files,
    ) -> None:
        """Open the journals of a run; close them with `close`.

        Args:
            run: its folder.
            name: of the tracker.
            title: the name of the remote run, for people.
            config: returns dotted keys and values from the run's folder.
            lineage: returns the ids of the run's branches, the first first; none if it has no `run.json`.
            files: the store of the folder.

        Raises:
            LockError: if another process publishes the run to this tracker.
            DataError: if a journal is damaged.
            OSError: if a file cannot be read or written.
        """
        self._run, self._tracker, self._project, self._title = run, tracker, project, title
        self._config, self._lineage, self._files = config, lineage, files
        self.folder = run / PUBLISH / name
        make_folders(files, self.folder)
        self._lock = _lock(self.folder)
        names = [match for match in map(_JOURNAL.fullmatch, os.listdir(self.folder)) if match]
        numbers = sorted((int(match[1]), match[0]) for match in names)
        self._journals = [Journal(self.folder / file_name) for _, file_name in numbers]
        self._reader = LogReader(run)
        self._open: Journal | None = None
        self._next = 0

    @property
    def remote_ids(self) -> list[str]:
        """Return the ids of the remote runs, that of the run's present branch last."""
        return [journal.head.id for journal in self._journals]

    def collect(self) -> None:
        """Take over the new lines of the log into the journals."""
        cuts = self._journals[-1].cuts if self._journals else 0
        update = self._reader.read(cuts)
        if update.is_tail and self._journals and self._journals[-1].diverges_at(update.contents[0][1]) is not None:
            update = self._reader.read(cuts, from_start=True)
        ids = self._lineage(self._run)
        for number, lines in update.contents[:-1]:  # of which branch they are is not recorded
            self._take_over(lines, cuts=number, lineage=ids[0] if len(ids) == 1 else None)
        for number, lines in update.contents[-1:]:
            self._take_over(lines, cuts=number, lineage=ids[-1] if ids else None)

    def send(self) -> int:
        """Send what the tracker lacks, and return the number of lines."""
        count = 0
        for journal in self._journals:
            if journal.is_sent:
                continue
            if self._open is not journal:
                self._next = self._tracker.open(self._remote(journal))
                self._open = journal
            self._require_journal_of(journal)
            while batch := list(islice(journal.texts(self._next), _BATCH)):
                self._tracker.send([row_of(self._next + index, text) for index, text in enumerate(batch)])
                self._next += len(batch)
                count += len(batch)
            if journal is not self._journals[-1]:
                self.finish()
                journal.mark_sent()
        return count

    def finish(self) -> None:
        """Let the tracker send what waits, and close its run."""
        if self._open is not None:
            self._open = None
            self._tracker.close()

    def reopen(self) -> None:
        """Begin anew after a failure: the log is read, and the remote run opened, which tells how many lines it has."""
        self._open, self._reader = None, LogReader(self._run)

    def close(self) -> None:
        """Let another process publish the run."""
        os.close(self._lock)

    def _take_over(self, lines: Sequence[LogLine], *, cuts: int, lineage: str | None) -> None:
        if not self._journals:
            if any(not line.event for line in lines):
                self._begin(lines, lineage=lineage, forked_at=None, cuts=cuts)
            return
        journal = self._journals[-1]
        diverged = journal.diverges_at(lines)
        if diverged is not None and (lineage is None or lineage != journal.head.lineage):
            self._begin(lines, lineage=lineage, forked_at=diverged - 1, cuts=cuts)
        else:
            journal.extend(lines, cuts=cuts)

    def _begin(self, lines: Sequence[LogLine], *, lineage: str | None, forked_at: int | None, cuts: int) -> None:
        number = len(self._journals)
        if number == 0:
            run_id = next(iter(self._lineage(self._run)), None) or secrets.token_hex(8)
        else:
            run_id = f"{self._journals[0].head.id}-{number}"
        config = {**self._config(self._run), **_versions(lines)}
        parent = self._journals[-1].head.id if number else None
        if parent is not None:
            config |= {"reprise.forked_from": parent, "reprise.forked_at": forked_at}
            _log.info("the run was sent back to iteration %s: its branch is the remote run %s", forked_at, run_id)
        head = JournalHead(run_id, parent, forked_at, lineage, config)
        path = self.folder / f"branch-{number}.jsonl"
        self._journals.append(Journal.create(path, head, lines, cuts=cuts, files=self._files))

    def _remote(self, journal: Journal) -> RemoteRun:
        forked_at = journal.head.forked_at
        title = self._title if forked_at is None else f"{self._title} from {forked_at}"
        return RemoteRun(journal.head.id, title, self._project, journal.head.config, self.folder, self._files)

    def _require_journal_of(self, journal: Journal) -> None:
        if self._next > journal.count:
            raise DataError(
                "The remote run has more lines than its journal",
                where=f"run {journal.head.id}",
                expected=f"at most {journal.count}, those of {journal.path}",
                found=self._next,
                fix=f"A copy of the run's folder was published. Move {self.folder} away, and run.json if this is "
                "another run, to begin a remote run of its own.",
            )


def _lock(folder: Path) -> int:
    """Return the descriptor of a lock that ends with the process; the file tells its folder from copies of it.

    Raises:
        LockError: if another process holds it.
        DataError: if the folder is a copy, and the one it was copied from is still there.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _settle_owner(descriptor, folder)
    except (OSError, DataError) as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise
        fix = "It sends the lines; a second one is not needed."
        raise LockError("Another process publishes this run to the tracker", where=folder, fix=fix) from error
    return descriptor


def _settle_owner(lock: int, folder: Path) -> None:
    """Record the folder in its lock file, by path and inode, unless it is a copy of a folder that is still there."""
    current = {"folder": str(folder.resolve()), "inode": os.fstat(lock).st_ino}
    recorded = _recorded_owner(lock)
    if recorded == current:
        return
    if recorded is not None and recorded["inode"] != current["inode"]:
        with contextlib.suppress(OSError):  # which cannot be reached from here, and so is not published from here
            if os.stat(Path(recorded["folder"], "lock")).st_ino == recorded["inode"]:
                raise DataError(
                    "The folder of a published run was copied; its copy would write into the same remote run",
                    where=folder,
                    expected=recorded["folder"],
                    fix=f"Remove {folder}, and run.json if this is another run: a remote run of its own then begins.",
                )
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(current).encode(), 0)


def _recorded_owner(lock: int) -> Json | None:
    """Return the folder in a lock file; None for an empty or truncated one."""
    try:
        recorded = json.loads(os.pread(lock, 1 << 16, 0))
        return {"folder": str(recorded["folder"]), "inode": int(recorded["inode"])}
    except (ValueError, TypeError, LookupError):
        return None


def _versions(lines: Sequence[LogLine]) -> dict[str, object]:
    """Return the versions of packages in the newest line that has them: the first one after a start."""
    for line in reversed(lines):
        versions = json.loads(line.text).get("versions") if '"versions"' in line.text else None
        if isinstance(versions, dict):
            return {f"versions.{name}": version for name, version in versions.items()}
    return {}


def flat(config: Json, prefix: str = "") -> Json:
    """Return the values of nested sections by dotted keys."""
    values: Json = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        values |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return values
