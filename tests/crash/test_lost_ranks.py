"""A rank that is killed or hangs at any moment: the others end in bounded time, with a status, and name it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.moments import KILLED, STOPPED, standing
from tests.harness import TINY, Ended, run_ok

TIMEOUT_S = 5.0
# Some wait twice; beside that there are the roll call, the farewell and a rank's grace.
BOUND_S = 2 * TIMEOUT_S + 15.0
BASE = (
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=4",
    "checkpoint.save_interval=2",
    "checkpoint.commit_timeout_s=2",
    f"train.distributed_timeout_minutes={TIMEOUT_S / 60}",
)
ZERO3 = "parallel.zero_stage=3"
TP2 = "parallel.tensor_model_parallel_size=2"
PP2 = "parallel.pipeline_model_parallel_size=2"
ITERATION = {"forward": 2, "save": 2, "publish": 2}


@dataclass(frozen=True, slots=True)
class Loss:
    """What becomes of which of two ranks, and when; `status` is how the other is to end."""

    moment: str
    deed: str
    rank: int = 1
    topology: str = "parallel.zero_stage=1"
    status: int = 1


# The losses of a group happen in jobs side by side: they mostly wait.
GROUPS: dict[str, list[Loss]] = {
    "train, one": [Loss("forward", KILLED)],
    "meet": [Loss("meet", KILLED), Loss("meet", STOPPED), Loss("meet", KILLED, 0), Loss("meet", STOPPED, 0)],
    "group and data": [Loss("group", KILLED), Loss("group", STOPPED), Loss("data", KILLED), Loss("data", STOPPED)],
    "build and load": [Loss("build", KILLED), Loss("build", STOPPED), Loss("load", KILLED), Loss("load", STOPPED)],
    "train": [
        Loss("forward", KILLED, 0, ZERO3),
        Loss("forward", STOPPED, topology=ZERO3),
        Loss("forward", KILLED, topology=PP2),
        Loss("forward", STOPPED, topology=TP2),
    ],
    "save": [Loss("save", KILLED), Loss("save", STOPPED), Loss("publish", STOPPED, 0)],
    "exit": [Loss("exit", KILLED), Loss("exit", STOPPED)],
    # All is saved, and all ranks know: the other has done what it was to do.
    "after the last barrier": [Loss("farewell", KILLED, status=0), Loss("farewell", STOPPED, 0, status=0)],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint to load."""
    run = tmp_path_factory.mktemp("saved") / "run"
    run_ok(run, [*BASE, "train.exit_interval=2"])
    return run / "checkpoints/iter_0000002"


def lose(losses: list[Loss], folder: Path, saved: Path) -> list[Ended]:
    """Run a job for each loss, and return how they ended once all other ranks have, in bounded time."""
    with ExitStack() as stack:
        jobs = []
        for number, loss in enumerate(losses):
            load = [f"checkpoint.load={saved}", "checkpoint.reshard=true"] if loss.moment == "load" else []
            job = standing(
                folder / f"run{number}",
                [*BASE, loss.topology, *load],
                moment=loss.moment,
                iteration=ITERATION.get(loss.moment, 0),
                ranks=2,
                gated=[loss.rank],
                deed=loss.deed,
            )
            jobs.append(stack.enter_context(job))
        for _, gate in jobs:
            gate.await_reached()
        for loss, (running, _) in zip(losses, jobs, strict=True):
            running.join(BOUND_S, but=[loss.rank])
        return [running.ended() for running, _ in jobs]


@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=pytest.mark.slow if at else ()) for at, name in enumerate(GROUPS)]
)
def test_the_other_rank_ends_soon_and_names_the_lost_one(saved: Path, tmp_path: Path, group: str) -> None:
    for loss, ended in zip(GROUPS[group], lose(GROUPS[group], tmp_path, saved), strict=True):
        said = ended.outputs[1 - loss.rank]
        assert ended.statuses[1 - loss.rank] == loss.status, f"{loss}\n{ended.text}"
        assert loss.status == 0 or f"rank {loss.rank}" in said.lower(), f"{loss}\n{said}"
    assert all((path / "manifest.json").exists() for path in tmp_path.glob("run*/checkpoints/iter_*"))
    if group == "after the last barrier":
        assert len(list(tmp_path.glob("run*/checkpoints/iter_0000004"))) == 2
