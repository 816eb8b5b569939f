"""The folders that a save writes to, and the ranks that write to each: one shared folder, or one folder per host."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from reprise.commit.channel import StoreChannel


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run by number. A shared folder is that of one host, which has all ranks.

    The first rank of a host is its leader: it alone changes names in the host's folder.
    """

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def shared(world_size: int) -> Hosts:
        """Return the one host of a folder that all ranks, from 0 on, share."""
        return Hosts.of(range(world_size))

    @staticmethod
    def of(ranks: Sequence[int]) -> Hosts:
        """Return the one host of a folder that these ranks share; the first coordinates."""
        return Hosts(("",), (tuple(ranks),))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return the leader of each host; the first is that of the rank that coordinates a save, rank 0."""
        return tuple(ranks[0] for ranks in self.ranks)

    def number_of(self, rank: int) -> int:
        """Return the number of the host of a rank."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def ranks_with(self, rank: int) -> tuple[int, ...]:
        """Return all ranks on the host of a rank."""
        return self.ranks[self.number_of(rank)]

    def leader_of(self, rank: int) -> int:
        """Return the leader of the host of a rank."""
        return self.leaders[self.number_of(rank)]


def find_hosts(channel: StoreChannel, local_ranks: Sequence[int], key: str) -> Hosts:
    """Return the hosts of a run, numbered by their lowest rank. A call of all ranks.

    Args:
        local_ranks: the ranks of this host, this one among them; empty for this one alone.
        key: of the messages, new on this channel.
    """
    row = [socket.gethostname(), min([channel.rank, *local_ranks])]
    rows = channel.gather(f"{key}/hosts", json.dumps(row).encode())
    table = channel.from_first(f"{key}/table", lambda: [json.loads(data) for data in rows])
    ranks: dict[int, list[int]] = {}
    for rank, (_, leader) in enumerate(table):
        ranks.setdefault(leader, []).append(rank)
    return Hosts(tuple(table[leader][0] for leader in ranks), tuple(tuple(members) for members in ranks.values()))
