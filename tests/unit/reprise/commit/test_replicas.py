"""Ranks that hold the same box are compared by digests of the moment, and the tensor that differs is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.commit import replicas
from reprise.commit.replicas import ReplicaDigests, check_replicas, checksum, differing_sides
from reprise.errors import CheckpointError, LockError, ReplicaError
from reprise.ranks.channel import StoreChannel
from tests.fakes import Axis, Sharding, run_ranks, sample_specs, sample_state

SPECS = sample_specs()
STATE = sample_state(SPECS, seed=3)
SHARDINGS = (
    Sharding("3 replicas", (Axis("replica", 3),)),
    Sharding("replicas of rows", (Axis("replica", 2), Axis("row", 2))),
    Sharding("replicas of columns", (Axis("replica", 2), Axis("column", 2))),
)


@given(st.binary(min_size=1, max_size=70), st.data())
def test_a_checksum_sees_every_flipped_bit(data: bytes, draw: st.DataObject) -> None:
    original = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    changed = original.clone()
    changed[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert int(checksum(original)) == int(checksum(original.clone()))
    assert int(checksum(original)) != int(checksum(changed))
    elsewhere = torch.cat([torch.zeros(1, dtype=torch.uint8), original])[1:]
    assert int(checksum(elsewhere)) == int(checksum(original))


NAMES = [spec.name for spec in SPECS if spec.total_bytes]


@pytest.mark.parametrize(
    ("sharding", "culprit", "names", "expected"),
    [
        (SHARDINGS[1], None, [], ""),
        (
            SHARDINGS[1],
            0,
            ["exp_avg.embedding"],
            "exp_avg.embedding (the box at [0, 0] of [601, 100]); rank 0 against rank 2",
        ),
        (
            SHARDINGS[1],
            3,
            ["exp_avg.embedding"],
            "exp_avg.embedding (the box at [601, 0] of [600, 100]); rank 1 against rank 3",
        ),
        (SHARDINGS[0], 1, ["embedding"], "found embedding; ranks 0, 2 against rank 1"),
        (SHARDINGS[0], 1, NAMES, f"{'; '.join(NAMES[:3])}; and {len(NAMES) - 3} more; ranks 0, 2"),
    ],
)
def test_differing_replicas_are_refused_by_tensor_and_ranks(
    sharding: Sharding, culprit: int | None, names: list[str], expected: str
) -> None:
    def call(channel: StoreChannel) -> None:
        live = sharding.live(channel.rank, SPECS, STATE)
        for tensor in live:
            if channel.rank == culprit and tensor.spec.name in names:
                tensor.local.view(-1).view(torch.uint8)[-1] ^= 1
        check_replicas(live, channel, "load")

    for rank, outcome in enumerate(run_ranks(sharding.world_size, call)):
        if culprit is None:
            assert outcome is None
        else:
            assert isinstance(outcome, ReplicaError if rank == 0 else CheckpointError)
            assert expected in str(outcome)


def test_a_problem_says_more_than_differing_replicas() -> None:
    def call(channel: StoreChannel) -> None:
        live = SHARDINGS[0].live(channel.rank, SPECS, STATE)
        live[0].local.view(-1).view(torch.uint8)[0] = channel.rank
        check_replicas(live, channel, "load", problem=LockError("Taken") if channel.rank == 1 else None)

    outcomes = run_ranks(3, call)
    assert [type(outcome) for outcome in outcomes] == [LockError] * 3
    assert [str(outcome) for outcome in outcomes] == ["Rank 1: Taken.", "Taken.", "Rank 1: Taken."]


def test_digests_have_the_order_of_tensors_not_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "run_together", lambda calls, **_: [call() for call in reversed(calls)])
    assert [*ReplicaDigests(SHARDINGS[0].live(0, SPECS, STATE)).digests()] == NAMES


def test_replicas_with_other_boxes_differ() -> None:
    whole, rows = (Sharding("", (Axis(role, 2),)).live(1, SPECS[:1], STATE)[0] for role in ("replica", "row"))
    first, second = (ReplicaDigests([replace(tensor, replicas=(0, 1))]).groups() for tensor in (whole, rows))
    assert differing_sides({0: first, 1: second}) == [[0], [1]]


def test_a_run_of_one_rank_has_nothing_to_compare() -> None:
    run_ranks(1, lambda channel: check_replicas([], channel, "load"))
