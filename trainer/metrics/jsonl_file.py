"""Reads, cuts and appends to `metrics.jsonl`, a JSON object per line."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from reprise.files import Files, read_regular, replace_file, temporary_of
from reprise.json_file import dumps

_log = logging.getLogger(__name__)

_SAVES = ("save", "local_save")  # the events of saves that a run may go on from


class JsonlFile:
    """A file of JSON lines to append to. While the disk fails, lines wait in memory until it works again.

    One thread adds lines; others may sync meanwhile, without making it wait for the disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._waiting = bytearray()
        self._lock = threading.Lock()  # of the lines that wait
        self._syncing = threading.Lock()  # of the descriptor, but for writes
        self._is_closed = False
        self._has_failed = False

    def add(self, members: Mapping[str, object]) -> None:
        """Append an object as a line; NaN and infinity become null."""
        line = f"{dumps(members)}\n".encode()
        with self._lock:
            self._waiting += line
        self._try(self._write)

    def sync(self) -> None:
        """Make all lines durable; they are once the file is closed."""
        with self._syncing:
            if not self._is_closed:
                self._try(self._write, lambda: os.fsync(self._descriptor))

    def close(self) -> None:
        """Make all lines durable, since a save under way may land later, and close the file."""
        with self._syncing:
            self._try(self._write, lambda: os.fsync(self._descriptor))
            if self._waiting:
                _log.error("%s lacks its last %d bytes", self._path, len(self._waiting))
            self._is_closed = True
            os.close(self._descriptor)

    def _write(self) -> None:
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
                _log.error("%s cannot be written, its lines wait in memory: %s", self._path, error)
            self._has_failed = True


def cut_after(path: Path, iteration: int, *, files: Files, owes_evaluation: bool = False) -> set[int]:
    """Move lines after `iteration`, and truncated lines, to `metrics.abandoned-k.jsonl`.

    Lines are written to the side file before they are removed from `path`. A process killed in between leaves them in
    both, and the next cut rewrites the side file. `path` is always replaced by a new file, so an older, suspended
    process appends to the old, unlinked file when it continues.

    Args:
        owes_evaluation: also move the evaluation of `iteration`, because it will run again.

    Returns:
        The training iterations whose lines stay.
    """
    if not path.exists():
        return set()
    retained, cut, recorded = list[str](), list[str](), set[int]()
    for line in _read_lines(path):
        number, event = _parsed(line)
        is_kept = number is not None and number <= iteration
        if owes_evaluation and number == iteration:
            is_kept = event != "evaluation"
        (retained if is_kept else cut).append(line)
        if number is not None and is_kept and event is None:
            recorded.add(number)
    side, is_unfinished = _side_file(path, {*retained, *cut})
    if cut:
        replace_file(files, side, _to_bytes(cut))
    replace_file(files, path, _to_bytes(retained))
    if is_unfinished and not cut:
        files.remove_file(side)
    for temporary in (temporary_of(path), temporary_of(side)):
        files.remove_file(temporary)
    return recorded


def _side_file(path: Path, lines: Collection[str]) -> tuple[Path, bool]:
    """Return the side file for lines cut from `path`, and whether it belongs to an interrupted cut.

    Args:
        lines: all lines of `path`. The last side file holds only some of these if its cut was interrupted.
    """
    count, last = 1, list[str]()
    while (side := _side_path(path, count)).exists():
        last = _read_lines(side)
        count += 1
    if last and all(line in lines for line in last):
        return _side_path(path, count - 1), True
    return side, False


def newest_side_file(path: Path) -> str | None:
    """Return the name of the last file with abandoned lines of `path`, or None."""
    count = 0
    while _side_path(path, count + 1).exists():
        count += 1
    return _side_path(path, count).name if count else None


def _side_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.abandoned-{number}.jsonl")


def last_recorded_iteration(path: Path) -> int | None:
    """Return the last iteration recorded in `path`, or None."""
    if not path.exists():
        return None
    numbers = [_parsed(line)[0] for line in _read_lines(path)]
    return max((number for number in numbers if number is not None), default=None)


def last_saved_iteration(path: Path) -> int | None:
    """Return the newest iteration saved according to `path`, in the shared folder or on hosts, or None."""
    if not path.exists():
        return None
    parsed = [_parsed(line) for line in _read_lines(path)]
    return max((number for number, event in parsed if number is not None and event in _SAVES), default=None)


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a file with their line ends; bytes of invalid UTF-8, left by a dying host, are kept."""
    return read_regular(path).decode("utf-8", errors="surrogateescape").splitlines(keepends=True)


def _to_bytes(lines: Iterable[str]) -> bytes:
    return "".join(lines).encode("utf-8", errors="surrogateescape")


def _parsed(line: str) -> tuple[int | None, object]:
    """Return a line's iteration, None if the line is truncated, and its event, None for a training iteration."""
    if not line.endswith("\n"):
        return None, None
    try:
        members = json.loads(line)
        number = members["iteration"]
        return (number if isinstance(number, int) else None), members.get("event")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None
