"""The benchmark of planning runs, and counts the messages between ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from scripts.bench import planning as bench_planning


def test_planning_is_measured_on_every_simulated_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_planning.main(["tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 8
    assert found["collectives"] == 0
    assert found["most_written"] <= 1.1 * found["mean_written"]
    # The data of the files, that is all but their headers, has been written once.
    assert 0 < found["checkpoint_bytes"] - found["mean_written"] * 8 < 1 << 18
    assert bench_planning.main(["tiny"]) == 0
    assert capsys.readouterr().out.startswith("tiny on 8 ranks")


def test_messages_between_ranks_are_counted_for_dtensors_too() -> None:
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (8,))
        cut = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
        with bench_planning.Collectives() as seen:
            torch.ones(4).sum()
            cut.detach()
            assert seen.count == 0
            dist.all_reduce(torch.ones(4))
            assert seen.count == 1
            cut.full_tensor()
            assert seen.count > 1
    finally:
        dist.destroy_process_group()
