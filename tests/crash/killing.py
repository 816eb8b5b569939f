"""Ends a process with SIGKILL at the n-th call that it makes to the file system below a folder, or at a message.

The calls are Python's own (`os.open`, `os.rename` ...) and fallocate(2), so that none is forgotten: those of the
engine, the lock, the metrics file, and every step of removing a folder. Messages are calls of `StoreChannel`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trainer.start.fill
from reprise.ranks import StoreChannel
from reprise.storage import WEIGHTS, Json, files, iteration_of
from tests.crash.hosts import run_trainer
from tests.harness import DEADLINE_S, around_iterations, started
from trainer.run.build import Run

BEFORE, AFTER, TORN = "before", "after", "torn"
# What takes a path first, and what takes a descriptor first.
_BY_PATH = ("open", "rename", "link", "unlink", "rmdir", "mkdir", "truncate", "utime")
_BY_DESCRIPTOR = ("close", "write", "pwrite", "pwritev", "preadv", "fsync", "ftruncate")
_MESSAGES = ("put", "read_all", "delete")
_WRITES = ("write", "pwrite", "pwritev")


class Killer:
    """Counts calls below `root` and dies at one of them; notes in a file outside what it commits.

    Args:
        at: number of the call to die at; None counts only.
        when: before the call, after it, or half-way through a write.
    """

    def __init__(self, root: Path, *, notes: Path, at: int | None = None, when: str = BEFORE) -> None:
        self._root, self._at, self._when = str(root), at, when
        self._lock = threading.Lock()
        self._descriptors: set[int] = set()
        self._real = {name: getattr(os, name) for name in (*_BY_PATH, *_BY_DESCRIPTOR)}
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.calls: list[str] = []

    def install(self) -> None:
        """Take the place of the system's calls in this process, for good."""
        for name in _BY_PATH:
            setattr(os, name, self._by_path(name))
        for name in _BY_DESCRIPTOR:
            setattr(os, name, self._by_descriptor(name))
        files._libc = _Libc(files._libc, self)  # type: ignore[assignment]

    def install_for_messages(self) -> None:
        """Count the messages of every channel of this process too, for good."""
        for name in _MESSAGES:
            setattr(StoreChannel, name, self._message(name, getattr(StoreChannel, name)))

    def _message(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.count(name, lambda: real(*arguments, **keywords))

        return call

    def is_below(self, descriptor: object) -> bool:
        """Return whether a descriptor, or the one that a path object is, belongs to a file below the root."""
        return descriptor in self._descriptors

    def count(self, name: str, call: Callable[[], Any], torn: Callable[[], object] | None = None) -> Any:
        """Make one call below the root, and die if it is the one."""
        with self._lock:
            is_last = len(self.calls) == self._at
            self.calls.append(name)
        if is_last and self._when == BEFORE:
            _die()
        if is_last and self._when == TORN and torn is not None:
            torn()
            _die()
        try:
            return call()
        finally:
            if is_last:
                _die()

    def _by_path(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(path: Any, *arguments: Any, **keywords: Any) -> Any:
            folder = keywords.get("dir_fd")
            is_below = self.is_below(folder) or self.is_below(path)
            if not is_below and (isinstance(path, int) or not os.fspath(path).startswith(self._root)):
                return real(path, *arguments, **keywords)
            return self.count(name, lambda: self._made(name, real, path, arguments, keywords))

        return call

    def _made(self, name: str, real: Callable[..., Any], path: Any, arguments: Any, keywords: Any) -> Any:
        committed = iteration_of(Path(arguments[0])) if name == "rename" else None
        kind = "-weights" if name == "rename" and Path(arguments[0]).parent.name == WEIGHTS else ""
        if committed is not None:
            self._note(f"begins{kind}", committed)
        result = real(path, *arguments, **keywords)
        if name == "open":
            self._descriptors.add(result)
        if committed is not None:
            self._note(f"committed{kind}", committed)
        return result

    def _note(self, what: str, iteration: int) -> None:
        self._real["write"](self._notes, f"{what} {iteration}\n".encode())

    def _by_descriptor(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(descriptor: int, *arguments: Any) -> Any:
            if not self.is_below(descriptor):
                return real(descriptor, *arguments)
            if name == "close":
                self._descriptors.discard(descriptor)

            def tear() -> None:
                if name in _WRITES:
                    real(descriptor, _half(arguments[0]), *arguments[1:])

            return self.count(name, lambda: real(descriptor, *arguments), tear)

        return call


class _Libc:
    """The C library as the engine calls it."""

    def __init__(self, real: Any, killer: Killer) -> None:
        self._real, self._killer = real, killer

    def fallocate(self, descriptor: int, *arguments: object) -> int:
        if not self._killer.is_below(descriptor):
            return int(self._real.fallocate(descriptor, *arguments))
        return int(self._killer.count("fallocate", lambda: self._real.fallocate(descriptor, *arguments)))


def _half(data: bytes | bytearray | Sequence[memoryview]) -> Any:
    """Return the first half of what was to be written, at least a byte less."""
    if isinstance(data, bytes | bytearray):
        return data[: len(data) // 2]
    whole = b"".join(bytes(part) for part in data)
    return [memoryview(whole[: len(whole) // 2])]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal ends all threads, but not before this call returns


def train_until_killed(arguments: list[str]) -> None:
    """Run the trainer's command below a Killer. It notes its calls, and those of the window before iteration 1, beside.

    Args:
        arguments: in JSON the run, the rank that dies, the call and the moment; then overrides.
    """
    told = json.loads(arguments[0])
    run, rank = Path(told["run"]), os.environ.get("RANK", "0")
    at = told["at"] if rank == str(told["victim"]) else None
    killer = Killer(run, notes=run.with_name(f"notes{rank}"), at=at, when=told["when"])
    killer.install()
    note, window = trainer.start.fill.note_start, list[int]()

    def noted(*arguments: Any, **keywords: Any) -> Json | None:
        window.append(len(killer.calls))
        return note(*arguments, **keywords)

    def begins(_: Run, iteration: int) -> None:
        if iteration == 1:
            run.with_name("window").write_text(json.dumps([*window, len(killer.calls)]))

    trainer.start.fill.note_start = noted
    around_iterations(before=begins)
    run_trainer([f"run.dir={run}", *arguments[1:]])
    run.with_name(f"calls{rank}").write_text(str(len(killer.calls)))


def trained_until_killed(
    run: Path, overrides: Sequence[str], *, ranks: int = 1, victim: int = 0, at: int | None = None, when: str = BEFORE
) -> int | None:
    """Run the trainer on ranks, of which one dies at a call; return how that one ended. No rank outlives it long."""
    told = json.dumps({"run": str(run), "victim": victim, "at": at, "when": when})
    with started(train_until_killed, [told, *overrides], folder=run, ranks=ranks) as running:
        running.processes[victim].join(DEADLINE_S)
        if at is None:
            running.join(DEADLINE_S)
    return running.ended().statuses[victim]
