"""Ranks along the axes, what torchrun tells a rank, and when a run stops early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.launch.environment import Environment
from trainer.parallel.mesh import stage_grid
from trainer.parallel.topology import Coordinate, Topology

sizes = st.integers(1, 5)


@given(sizes, sizes, sizes)
def test_every_coordinate_has_one_rank_and_tp_runs_fastest(pp: int, dp: int, tp: int) -> None:
    topology = Topology(pp=pp, dp=dp, tp=tp)
    found = [topology.coordinate(rank) for rank in range(topology.world_size)]
    assert found == [Coordinate(p, d, t) for p in range(pp) for d in range(dp) for t in range(tp)]


def test_consecutive_data_parallel_ranks_share_a_copy() -> None:
    grid = stage_grid(Topology(pp=2, dp=4, tp=2, replicate=2), 1)
    assert grid.axes == ("replicate", "dp", "tp")
    assert grid.holders({"replicate": 0, "tp": 0}) == (8, 10)
    assert grid.holders({"dp": 0, "tp": 0}) == (8, 12)
    assert grid.holders({"tp": 1}) == (9, 11, 13, 15)


def test_a_plain_process_is_a_world_of_one() -> None:
    found = Environment.read({"PATH": "/bin"})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (0, 1, 0, 1)
    assert not found.has_agent_store


def test_torchruns_variables_are_read() -> None:
    sizes = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    address = {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert Environment.read({**sizes, **address}) == Environment(5, 8, 1, 4, "host", 29500, True)
