"""Ranks that hold the same box are compared by digests of the moment, and the tensor that differs is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.commit.inventory import SharedDigests
from reprise.commit.replicas import ReplicaDigests, check_replicas, checksum
from reprise.errors import CheckpointError
from reprise.ranks.channel import StoreChannel
from tests.fakes import Axis, Sharding, run_ranks, sample_specs, sample_state

SPECS = sample_specs()
STATE = sample_state(SPECS, seed=3)
SHARDINGS = (
    Sharding("3 replicas", (Axis("replica", 3),)),
    Sharding("replicas of rows", (Axis("replica", 2), Axis("row", 2))),
    Sharding("replicas of columns", (Axis("replica", 2), Axis("column", 2))),
)


def digests_of_all(sharding: Sharding, spoil: tuple[int, str] | None = None) -> list[SharedDigests]:
    """Return what each rank digests; `spoil` names a rank and a tensor of which its last byte is another."""
    digests = []
    for rank in range(sharding.world_size):
        live = sharding.live(rank, SPECS, STATE)
        for tensor in live:
            if spoil == (rank, tensor.spec.name):
                tensor.local.view(-1).view(torch.uint8)[-1] ^= 1
        replicas = ReplicaDigests(live)
        for tensor in live:
            tensor.local.zero_()  # what changes later is not digested
        digests.append(replicas.by_ranks())
    return digests


@pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda s: s.name)
def test_replicas_agree_and_a_single_differing_bit_is_seen(sharding: Sharding) -> None:
    good = digests_of_all(sharding)
    for group in {group for digests in good for group in digests}:
        members = [good[rank][group] for rank in group]
        assert all(member == members[0] for member in members)
    group = next(group for group, tensors in good[0].items() if "embedding" in tensors)
    assert len(group) > 1
    assert len(set(good[0][group].values())) > 1
    spoiled = digests_of_all(sharding, (group[1], "embedding"))
    assert spoiled[group[0]][group]["embedding"] != spoiled[group[1]][group]["embedding"]
    assert spoiled[group[0]][group]["exp_avg.embedding"] == spoiled[group[1]][group]["exp_avg.embedding"]


@given(st.binary(min_size=1, max_size=70), st.data())
def test_a_checksum_sees_every_flipped_bit(data: bytes, draw: st.DataObject) -> None:
    original = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    changed = original.clone()
    changed[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert int(checksum(original)) == int(checksum(original.clone()))
    assert int(checksum(original)) != int(checksum(changed))
    elsewhere = torch.cat([torch.zeros(1, dtype=torch.uint8), original])[1:]
    assert int(checksum(elsewhere)) == int(checksum(original))


@pytest.mark.parametrize("culprit", [None, 0, 3])
def test_differing_replicas_are_refused_by_tensor_and_ranks(culprit: int | None) -> None:
    sharding = SHARDINGS[1]

    def call(channel: StoreChannel) -> None:
        live = sharding.live(channel.rank, SPECS, STATE)
        if channel.rank == culprit:
            (tensor,) = [t for t in live if t.spec.name == "exp_avg.embedding"]
            tensor.local.view(torch.uint8).view(-1)[-1] ^= 1
        check_replicas(live, channel, "load")

    outcomes = run_ranks(sharding.world_size, call)
    if culprit is None:
        assert outcomes == [None] * 4
        return
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError)
        assert "hold different bits" in str(outcome)
        assert "exp_avg.embedding" in str(outcome)
        assert ("rank 0 against rank 2" if culprit == 0 else "rank 1 against rank 3") in str(outcome)


def test_a_run_of_one_rank_has_nothing_to_compare() -> None:
    run_ranks(1, lambda channel: check_replicas([], channel, "load"))
