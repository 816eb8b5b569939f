"""torchrun's jobs whose workers or hosts are killed: started again by torchrun, they go on by themselves."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.faults.ranks import free_port
from tests.crash.moments import KILLED, Gate
from tests.crash.outcomes import assert_ends_as
from tests.crash.torchrun import TWO_RANKS, torchrun
from tests.harness import TINY, run_ok
from tests.profiles import nightly

pytestmark = pytest.mark.slow

ITERATIONS = 10
GLOBAL_BATCH = 12  # see TINY
BASE = (
    "model=gpt2_tiny",
    *TINY,
    f"train.train_iters={ITERATIONS}",
    "checkpoint.save_interval=2",
    "train.distributed_timeout_minutes=0.5",
)


# When iteration 5 begins, so has the save of iteration 4, for which that of iteration 2 has ended.
@pytest.mark.parametrize(
    ("topology", "kills"),
    [
        ([], [("forward", 5, 1)]),
        nightly([], [("forward", 5, 1), ("step", 7, 0)]),
        nightly(["parallel=tp2"], [("step", 5, 0)]),
    ],
    ids=["dp2", "dp2, twice", "tp2"],
)
def test_a_job_restarted_by_torchrun_ends_as_the_unbroken_one(
    tmp_path: Path, topology: list[str], kills: list[tuple[str, int, int]]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_ok(whole, [*BASE, *topology], ranks=2)
    gates = [Gate.at(tmp_path / f"kill{at}", moment, at, [rank], KILLED) for moment, at, rank in kills]
    with torchrun([*TWO_RANKS, "--max-restarts", "3"], gates, run, [*BASE, *topology]) as agent:
        status, text = agent.finish()
    assert status == 0, text
    assert all(list(Path(each.folder).glob("reached.*")) for each in gates)
    assert text.count("starting fresh") == 1
    assert text.count("tensors, ") == len(kills)  # loaded by each that came after
    assert_ends_as(run, whole)


def fed(folder: Path, first: int, last: int, world_size: int) -> list[int]:
    """Return the positions of the samples that the ranks were fed in some iterations."""
    rows = [json.loads(line) for path in folder.glob("fed.*") for line in path.read_text().splitlines()]
    return [
        position
        for row in rows
        if row["world_size"] == world_size and first <= row["iteration"] <= last
        for position in row["positions"]
    ]


@pytest.mark.nightly
def test_a_job_without_a_lost_host_ends_as_the_unbroken_one(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    # A host alone has all cores for its one rank, so its number of threads is fixed.
    base = [*BASE, "model.dropout=0.1", "train.threads=1", "parallel.invariant_ranks=2"]
    run_ok(whole, base, ranks=2)
    stand = Gate.at(tmp_path / "gates", "forward", 6, [0, 1])
    notes = Gate.at(tmp_path / "fed", "feed", 0, [0, 1])
    times = "is_host={},last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-id", "elastic", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf"]
    overrides = [*base, "checkpoint.reshard=true"]
    with ExitStack() as stack:
        stays, lost = (
            stack.enter_context(torchrun([*options, times.format(is_host)], [stand, notes], run, overrides))
            for is_host in (1, 0)
        )
        stand.await_reached()
        lost.kill()
        stand.open()
        status, text = stays.finish()
    assert status == 0, text
    assert "topology.world_size: saved 2, now 1" in text
    assert_ends_as(run, whole)
    # Of two hosts to the checkpoint that was loaded, of one after it.
    came_back = int(text.split(": iteration ")[-1].split()[0])
    consumed = [*fed(tmp_path / "fed", 1, came_back, 2), *fed(tmp_path / "fed", came_back + 1, ITERATIONS, 1)]
    assert sorted(consumed) == list(range(GLOBAL_BATCH * ITERATIONS))
