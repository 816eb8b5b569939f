"""Replicas are compared after a load, and the first tensor that differs is named."""

from __future__ import annotations

import pytest
import torch

from reprise.commit.channel import StoreChannel
from reprise.errors import CheckpointError
from reprise.loading.replicas import check_replicas
from tests.fakes import Axis, Sharding, run_ranks, sample_specs, sample_state

SPECS = sample_specs()
REPLICAS = Sharding("replicas of rows", (Axis("replica", 2), Axis("row", 2)))


@pytest.mark.parametrize("culprit", [None, 0, 3])
def test_differing_replicas_are_refused_by_tensor_and_ranks(culprit: int | None) -> None:
    state = sample_state(SPECS, seed=1)

    def call(channel: StoreChannel) -> None:
        live = REPLICAS.live(channel.rank, SPECS, state)
        if channel.rank == culprit:
            (tensor,) = [t for t in live if t.spec.name == "exp_avg.embedding"]
            tensor.local.view(torch.uint8).view(-1)[-1] ^= 1
        check_replicas(live, channel, "load")

    outcomes = run_ranks(REPLICAS.world_size, call)
    if culprit is None:
        assert outcomes == [None] * 4
        return
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError)
        assert "hold different bits" in str(outcome)
    partners = "ranks 0 and 2" if culprit == 0 else "ranks 1 and 3"
    assert partners in str(outcomes[0])
    assert culprit == 3 or "exp_avg.embedding" in str(outcomes[0])


def test_a_run_of_one_rank_has_nothing_to_compare() -> None:
    run_ranks(1, lambda channel: check_replicas([], channel, "load"))
