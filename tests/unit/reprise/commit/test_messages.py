"""Messages of a save arrive as they were, and travel in few bytes."""

from __future__ import annotations

import pytest

from reprise.commit import attempt
from reprise.commit.messages import (
    DecisionMessage,
    Message,
    Offer,
    Opening,
    RankReport,
    ranks_text,
    require_readiness,
)
from reprise.errors import CheckpointError
from tests.messages import refused

GROUPS = [[1, 4], [2**64 - 1, 0]]


@pytest.mark.parametrize(
    "message",
    [
        Offer(iteration=7, pieces=2**64 - 1, groups=GROUPS, payload=b"\ntable\n"),
        Offer(iteration=2**48 - 1, pieces=2**64 - 1, payload=b"\ntable\n"),
        RankReport(written_bytes=5, payload=bytes(range(256))),
        RankReport(problem="a disk, broken"),
        DecisionMessage(iteration=0, payload=b"[true, 2, null]"),
        DecisionMessage(problem="Rank 1: \udcff is no\ntext"),
        Opening(sides=[[0, 2], [3]]),
        Message(),
    ],
)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    assert type(message).from_bytes(message.to_bytes()) == message


def test_hosts_travel_in_bytes_that_hardly_grow_with_them() -> None:
    rows = [(f"node{rank // 8:04}", rank % 8) for rank in range(8 * 2048)]
    packed = attempt._packed(rows)
    hosts = attempt._unpacked(packed)
    assert len(packed) < 6500  # three bytes a name
    assert hosts.names == tuple(f"node{host:04}" for host in range(2048))
    assert hosts.leaders == tuple(range(0, len(rows), 8))
    assert hosts.ranks_with(13) == tuple(range(8, 16))


@pytest.mark.parametrize(
    ("third", "words"),
    [
        (Offer(iteration=5), ("iteration 4 on ranks 0, 1", "iteration 5 on rank 2")),
        (Offer(iteration=4, problem="there is no disk."), ("Rank 2: there is no disk",)),
    ],
)
def test_a_rank_that_is_not_ready_is_named(third: Offer, words: tuple[str, ...]) -> None:
    ready = {rank: Offer(iteration=4) for rank in (0, 1)}
    require_readiness(ready)
    with refused(CheckpointError, *words):
        require_readiness({**ready, 2: third})


def test_many_ranks_are_named_by_the_first_eight() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert ranks_text(range(9)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"
