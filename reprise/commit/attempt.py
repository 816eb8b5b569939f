"""One attempt to save: where it goes, and its state on one rank, which two threads share."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from reprise.commit import commit_state
from reprise.commit.commit_state import Action, CommitState, Event
from reprise.commit.hosts import Hosts
from reprise.format.layout import Layout
from reprise.storage.folder import CheckpointFolder


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to save an iteration: `name` is unique in the life of the folder, the same on all ranks.

    Args:
        replaces: whether a checkpoint of this iteration gives way to this one, in place of being kept as superseded.
    """

    iteration: int
    name: str
    folder: CheckpointFolder
    layout: Layout
    hosts: Hosts = field(default_factory=lambda: Hosts.shared(1))
    replaces: bool = False

    @property
    def partial(self) -> Path:
        """Return the folder in which this host's ranks write."""
        return self.folder.partial(self.iteration, self.name)

    @property
    def old(self) -> Path | None:
        """Return the discarded checkpoint of this host whose files this attempt overwrites; None if there is none."""
        return next(iter(self.folder.discarded(self.name)), None)

    @property
    def mark(self) -> Path:
        """Return the file that every rank must see before it reports, where there are several ranks."""
        return self.folder.mark_of(self.iteration, self.name)


@dataclass(frozen=True, slots=True)
class Successor:
    """The attempt that overwrites, in place, the files of a checkpoint that retention gives up.

    Args:
        first: the lowest iteration of the checkpoints whose files it may overwrite: those of this process. The files
            of an earlier process may hold ranges that are other ranks' now, which nobody would overwrite or free.
    """

    name: str
    first: int


@dataclass(slots=True)
class AttemptNames:
    """The names of the attempts: equal on all ranks, and unique in the life of the folder.

    Args:
        earlier: on leaders, those of which a partial folder or messages may be left, by iteration and name.
    """

    nonce: str
    count: int = 0
    earlier: list[tuple[int, str]] = field(default_factory=list)
    _first: int | None = None  # the lowest iteration that became a checkpoint

    def next(self) -> str:
        """Return the name of the next one."""
        self.count += 1
        return f"{self.nonce}-{self.count}"

    def committed(self, iteration: int) -> None:
        """Take note of a checkpoint that one of the attempts has made."""
        self._first = iteration if self._first is None else min(iteration, self._first)

    def successor(self, iteration: int) -> Successor:
        """Return the attempt after that of `iteration`, which is the last one so far."""
        return Successor(f"{self.nonce}-{self.count + 1}", iteration if self._first is None else self._first)


class Copying(Protocol):
    """What a commit carries for the copies of local checkpoints: messages that it does not read."""

    @property
    def pinned(self) -> Collection[int]:
        """Return the iterations that must stay: without their copies, the loss of a disk would cost too much."""

    def status(self, iteration: int) -> bytes:
        """Return what this leader tells rank 0 with its answer on the attempt to save `iteration`."""

    def decide(self, statuses: Sequence[bytes]) -> bytes:
        """Return what rank 0 tells all leaders with its decision, given the status of each host."""

    def committed(self, attempt: Attempt, order: bytes) -> None:
        """Take note that this host has renamed, and of what rank 0 decided on the copies."""


class SharedCommitState:
    """The state of one attempt on one rank, shared by its worker and its main thread."""

    def __init__(self, rank: int, ranks: Sequence[int], leaders: Sequence[int] = ()) -> None:
        self._state = CommitState.of(rank, ranks, leaders)
        self._lock = threading.Lock()

    @property
    def current(self) -> CommitState:
        """Return the state now."""
        return self._state

    def take(self, event: Event) -> Action:
        """Take an event in, one thread at a time, and return the next action."""
        with self._lock:
            self._state, action = commit_state.advance(self._state, event)
            return action
