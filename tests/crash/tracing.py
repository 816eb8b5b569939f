"""Writes down every change and every sync that a process makes below a folder, for a model of what is durable.

Files and folders are told apart by their inodes: names change. It notes what Python's own calls do (`os.open`,
`os.rename` ...), as `killing.py` counts them; reserving blocks changes no content and is left out.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WRITES = ("write", "pwrite", "pwritev", "ftruncate")


class Tracer:
    """Appends events to the file `notes`, one line of JSON each; all processes that do so make one call at a time.

    Events: ["folder", parent, name, inode] and ["file", parent, name, inode] are made, ["link", parent, name, inode] is
    one more name of a file, ["rename", parent, name, new name], ["remove", parent, name], ["write", inode],
    ["sync", inode]; folders are given by their inodes.
    """

    def __init__(self, root: Path, notes: Path) -> None:
        self._root = str(root)
        self._lock = threading.Lock()
        self._open, self._write = os.open, os.write
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def install(self) -> None:
        """Take the place of the system's calls in this process, for good."""
        for name, note in (
            ("mkdir", self._made_folder),
            ("rename", self._renamed),
            ("link", self._linked),
            ("unlink", self._removed),
            ("rmdir", self._removed),
        ):
            setattr(os, name, self._by_path(getattr(os, name), note))
        for name in (*_WRITES, "fsync"):
            setattr(os, name, self._by_descriptor(getattr(os, name), "sync" if name == "fsync" else "write"))
        os.open = self._traced_open

    def say(self, *event: object) -> None:
        """Note an event."""
        self._write(self._notes, json.dumps(event).encode() + b"\n")

    def _traced_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._alone():
            is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            descriptor = self._open(path, flags, mode, dir_fd=dir_fd)
            if is_new and self._is_below(path, dir_fd):
                self.say("file", _inode(Path(path).parent), Path(path).name, _inode(path))
            if flags & os.O_TRUNC and self._is_below(path, dir_fd):
                self.say("write", _inode(path))
            return descriptor

    def _by_path(self, real: Callable[..., None], note: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *arguments: Any, dir_fd: int | None = None, **keywords: Any) -> None:
            given = keywords if dir_fd is None else {**keywords, "dir_fd": dir_fd}
            with self._alone():
                real(path, *arguments, **given)
                if self._is_below(path, dir_fd):
                    parent = os.fstat(dir_fd).st_ino if dir_fd is not None else _inode(Path(path).parent)
                    note(Path(path), parent, *arguments)

        return call

    def _by_descriptor(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            if not self._is_open_below(descriptor):
                return real(descriptor, *arguments)
            with self._alone():
                result = real(descriptor, *arguments)
                self.say(kind, os.fstat(descriptor).st_ino)
                return result

        return call

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._notes, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._notes, fcntl.LOCK_UN)

    def _made_folder(self, path: Path, parent: int, *_: object) -> None:
        self.say("folder", parent, path.name, _inode(path))

    def _renamed(self, path: Path, parent: int, target: Any) -> None:
        assert Path(target).parent == path.parent
        self.say("rename", parent, path.name, Path(target).name)

    def _linked(self, old: Path, _: int, path: Any, **_keywords: object) -> None:
        self.say("link", _inode(Path(path).parent), Path(path).name, _inode(old))

    def _removed(self, path: Path, parent: int) -> None:
        self.say("remove", parent, path.name)

    def _is_below(self, path: Any, dir_fd: int | None) -> bool:
        return self._is_open_below(dir_fd) if dir_fd is not None else os.fspath(path).startswith(self._root)

    def _is_open_below(self, descriptor: int) -> bool:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._root)


def _inode(path: Any) -> int:
    return os.lstat(path).st_ino
