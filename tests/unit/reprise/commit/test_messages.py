"""Messages of a save arrive as they were, and travel in few bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from reprise.commit.attempt import find_hosts
from reprise.commit.messages import (
    Message,
    pack_files,
    ranks_text,
    unpack_files,
)
from reprise.ranks.channel import StoreChannel

GROUPS = [[1, 4], [2**64 - 1, 0]]


@pytest.mark.parametrize(
    "message",
    [
        Message(number=2**64 - 1, groups=GROUPS, payload=b"\ntable\n"),
        Message(number=2**64 - 1, payload=b"\ntable\n"),
        Message(number=5, payload=bytes(range(256))),
        Message(problem="a disk, broken"),
        Message(number=0, payload=b"[true, 2, null]"),
        Message(problem="Rank 1: \udcff is no\ntext"),
        Message(number=7, groups=[[0, 2], [3]]),
        Message(),
    ],
)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    arrived = Message.from_bytes(message.to_bytes())
    assert replace(arrived, groups=list(arrived.groups)) == replace(message, groups=list(message.groups))


class Rank0(StoreChannel):
    """A channel of rank 0 that has the rows of all ranks, and measures what it sends."""

    rows: Sequence[bytes] = ()
    sent_bytes = 0

    def gather(self, key: str, data: bytes) -> list[bytes]:
        return list(self.rows)

    def put(self, key: str, data: bytes, *, is_first: bool = True) -> list[str]:
        self.sent_bytes += len(data)
        return [key]


def test_hosts_travel_in_bytes_that_hardly_grow_with_them() -> None:
    channel = Rank0(HashStore(), 0, world_size=8 * 2048, timeout_s=1.0)
    channel.rows = [json.dumps([f"node{rank // 8:04}", rank % 8]).encode() for rank in range(8 * 2048)]
    hosts = find_hosts(channel, range(8), "k")
    assert channel.sent_bytes < 5000  # two bytes a name
    assert hosts.names == tuple(f"node{host:04}" for host in range(2048))
    assert hosts.leaders == tuple(range(0, 8 * 2048, 8))
    assert hosts.ranks_with(13) == tuple(range(8, 16))


def test_files_travel_as_they_are() -> None:
    files = {"tokenizer.json": b"{}" * 100_000, "optimizer/state.json": b"", "manifest.json": b"\0\xff"}
    message = pack_files(files)
    assert len(message) < 2000
    assert list(unpack_files(message).items()) == list(files.items())


def test_many_ranks_are_named_by_the_first_eight() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert ranks_text(range(9)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"
