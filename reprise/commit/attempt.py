"""An attempt to save: its place, its hosts, and its state on a rank, which two threads share."""

from __future__ import annotations

import base64
import itertools
import json
import socket
import threading
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from reprise.commit import commit_state
from reprise.commit.commit_state import Action, CommitState, Event
from reprise.format.layout import Layout
from reprise.ranks.channel import StoreChannel
from reprise.storage.folder import CheckpointFolder


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run by number. A shared folder counts as the folder of a single host with all ranks.

    The first rank of a host is its leader: it alone changes names in the host's folder.
    """

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(ranks: Sequence[int]) -> Hosts:
        """Return the single host of a folder shared by these ranks; the first rank coordinates."""
        return Hosts(("",), (tuple(ranks),))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return the leader of each host; the first leads the host of the coordinator, rank 0."""
        return tuple(ranks[0] for ranks in self.ranks)

    def number_of(self, rank: int) -> int:
        """Return the number of the host of a rank."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def ranks_with(self, rank: int) -> tuple[int, ...]:
        """Return all ranks on the host of a rank."""
        return self.ranks[self.number_of(rank)]


def find_hosts(channel: StoreChannel, local_ranks: Sequence[int], key: str) -> Hosts:
    """Return the hosts of a run, numbered by their lowest rank. A call of all ranks.

    Args:
        local_ranks: the ranks of this host, this rank among them; empty for this rank alone.
        key: of the messages, new on this channel.
    """
    row = [socket.gethostname(), min([channel.rank, *local_ranks])]
    rows = channel.gather(f"{key}/hosts", json.dumps(row).encode())
    return _unpacked(channel.from_first(f"{key}/table", lambda: _packed([json.loads(data) for data in rows])))


def _packed(rows: list[tuple[str, int]]) -> str:
    """Return the names and the ranks of all hosts in a few bytes, where names and numbers follow a pattern.

    Args:
        rows: by rank, the name of its host and the lowest rank of that host.
    """
    names = {leader: rows[leader][0] for _, leader in rows}
    numbers = {leader: number for number, leader in enumerate(names)}
    steps = [numbers[leader] - numbers[before] for (_, before), (_, leader) in itertools.pairwise(rows[:1] + rows)]
    return base64.b64encode(zlib.compress(json.dumps([list(names.values()), steps]).encode())).decode()


def _unpacked(text: str) -> Hosts:
    names, steps = json.loads(zlib.decompress(base64.b64decode(text)))
    ranks: list[list[int]] = [[] for _ in names]
    for rank, number in enumerate(itertools.accumulate(steps)):
        ranks[number].append(rank)
    return Hosts(tuple(names), tuple(map(tuple, ranks)))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to save an iteration: `name` is unique in the life of the folder, the same on all ranks.

    Args:
        replaces: whether a checkpoint of this iteration gives way to the attempt, in place of being kept as superseded.
    """

    iteration: int
    name: str
    folder: CheckpointFolder
    layout: Layout
    hosts: Hosts = field(default_factory=lambda: Hosts.of((0,)))
    replaces: bool = False

    @property
    def partial(self) -> Path:
        """Return the folder in which this host's ranks write."""
        return self.folder.partial(self.iteration, self.name)

    @property
    def target(self) -> Path:
        """Return the path of the checkpoint that it becomes."""
        return self.folder.iteration(self.iteration)


def key_of(name: str) -> str:
    """Return the prefix of the keys of all messages on attempt `name`."""
    return f"save/{name}"


@dataclass(slots=True)
class AttemptNames:
    """The names of the attempts: equal on all ranks, and unique in the life of the folder.

    Args:
        earlier: those of which a partial folder or messages may be left, by iteration and name.
    """

    nonce: str
    count: int = 0
    earlier: list[tuple[int, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the name of the attempt that begins next."""
        return f"{self.nonce}-{self.count + 1}"

    def begin(self) -> None:
        """Count the next attempt."""
        self.count += 1


class Copying(Protocol):
    """What a commit carries for the copies of local checkpoints: messages not read by the commit."""

    @property
    def pinned(self) -> Collection[int]:
        """Return the iterations to keep: without their copies, the loss of a disk would cost too much."""

    def status(self, iteration: int) -> bytes:
        """Return what this leader tells rank 0 with its answer on the attempt to save `iteration`."""

    def decide(self, statuses: Sequence[bytes]) -> bytes:
        """Return what rank 0 tells all leaders with its decision, given the status of each host."""

    def committed(self, attempt: Attempt, order: bytes) -> None:
        """Take note of the rename on this host, and of rank 0's decision on the copies."""


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
