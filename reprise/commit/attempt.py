"""A save attempt: its place, its hosts, and what hosts with own folders copy."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from reprise.errors import TrainerError
from reprise.format import manifest
from reprise.format.layout import Layout
from reprise.format.names import MANIFEST
from reprise.ranks.channel import StoreChannel
from reprise.storage.folder import CheckpointFolder


@dataclass(frozen=True, slots=True)
class Hosts:
    """A run's hosts by number. A shared folder counts as a single host's folder with all ranks.

    A host's first rank is its leader: it alone changes names in the host's folder.
    """

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(ranks: Sequence[int]) -> Hosts:
        """Return a single host for a folder shared by these ranks. The first rank coordinates."""
        return Hosts(("",), (tuple(ranks),))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return each host's leader, the coordinator's (rank 0's) first."""
        return tuple(ranks[0] for ranks in self.ranks)

    def number_of(self, rank: int) -> int:
        """Return the host number for a rank."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def ranks_with(self, rank: int) -> tuple[int, ...]:
        """Return all ranks on the same host as a rank."""
        return self.ranks[self.number_of(rank)]


def find_hosts(channel: StoreChannel, local_ranks: Sequence[int], key: str) -> Hosts:
    """Return the run's hosts, numbered by their lowest rank. All ranks call it.

    Args:
        local_ranks: The ranks on this host, including this rank. Empty for this rank alone.
        key: Message key, new on this channel.
    """
    row = [socket.gethostname(), channel.rank - min([channel.rank, *local_ranks])]
    rows = map(json.loads, channel.gather(f"{key}/hosts", json.dumps(row).encode()))
    # In columns, each of which repeats itself: every rank gets all hosts in a few bytes.
    columns = zlib.compress(json.dumps(list(zip(*rows, strict=True))).encode())
    columns = channel.broadcast(f"{key}/table", columns if channel.coordinates else None)
    hosts: dict[int, tuple[str, list[int]]] = {}
    for rank, (name, distance) in enumerate(zip(*json.loads(zlib.decompress(columns)), strict=True)):
        hosts.setdefault(rank - distance, (name, []))[1].append(rank)
    names, ranks = zip(*hosts.values(), strict=True)
    return Hosts(names, tuple(map(tuple, ranks)))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to save an iteration. Its `name` is unique over the folder's lifetime and equal on all ranks.

    Args:
        replaces: Whether the attempt replaces an existing checkpoint for this iteration instead of keeping it as
            superseded.
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
        """Return the path of the resulting checkpoint."""
        return self.folder.iteration(self.iteration)

    def writing(self, path: Path | None = None) -> AbstractContextManager[None]:
        """Turn a file system error in the block into the error for an attempt that cannot be written.

        Args:
            path: The file being written, if the error does not name it. None for the partial folder.
        """
        return self.folder.writing("A checkpoint", path or self.partial, self.layout.total_bytes)

    def is_committed(self) -> bool:
        """Return whether the existing checkpoint comes from this attempt: the rename is the truth."""
        path = self.target / MANIFEST
        try:
            return manifest.from_bytes(self.folder.files.read_whole(path), where=path).attempt == self.name
        except (OSError, TrainerError):
            return False


class Copying(Protocol):
    """Messages about copies of local checkpoints, which the commit carries without reading them."""

    @property
    def pinned(self) -> Collection[int]:
        """Return the iterations to keep: without their copies, losing a disk would cost too much."""

    def status(self, iteration: int) -> bytes:
        """Return the message that this leader attaches to its answer to rank 0 on the save of `iteration`."""

    def decide(self, statuses: Sequence[bytes]) -> bytes:
        """Return the message that rank 0 attaches to its decision for all leaders, given each host's status."""

    def committed(self, attempt: Attempt, order: bytes) -> None:
        """Note this host's rename, and rank 0's decision on the copies."""
