"""A rank that is killed or hangs at any moment: the others end in bounded time, with a status, and name it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.moments import KILLED, STOPPED, standing
from tests.harness import TINY, Ended, run_ok

TIMEOUT_S = 8.0
# Some wait twice. The rest is for the answers to a failure, rank 0's wait for the others and the watchdog's grace.
BOUND_S = 2 * TIMEOUT_S + 200.0
BASE = (
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=4",
    "checkpoint.save_interval=2",
    "checkpoint.commit_timeout_s=60",
    f"train.distributed_timeout_minutes={TIMEOUT_S / 60}",
)
ZERO1, ZERO3 = "parallel.zero_stage=1", "parallel.zero_stage=3"
TP2 = "parallel.tensor_model_parallel_size=2"
PP2 = "parallel.pipeline_model_parallel_size=2"
ITERATION = {"forward": 2, "save": 2, "prepare": 2}


@dataclass(frozen=True, slots=True)
class Loss:
    """What becomes of which of two ranks, and when; `status` is how the other is to end."""

    moment: str
    deed: str
    rank: int = 1
    topology: str = ZERO1
    status: int = 1


LOSSES = [
    Loss("meet", STOPPED, 0),
    Loss("meet", KILLED, 0),
    Loss("meet", KILLED),
    Loss("meet", STOPPED),
    Loss("group", KILLED),
    Loss("group", STOPPED),
    Loss("data", KILLED),
    Loss("data", STOPPED),
    Loss("build", KILLED),
    Loss("build", STOPPED),
    Loss("load", KILLED),
    Loss("load", STOPPED),
    Loss("forward", KILLED, 0, ZERO3),
    Loss("forward", STOPPED, 1, ZERO3),
    Loss("forward", KILLED, 1, PP2),
    Loss("forward", STOPPED, 0, PP2),
    Loss("forward", STOPPED, 1, TP2),
    Loss("save", KILLED),
    Loss("save", STOPPED),
    Loss("prepare", STOPPED, 0),
    Loss("exit", KILLED),
    Loss("exit", STOPPED),
    # After the last barrier all is saved, and all ranks know: the other has done what it was to do.
    Loss("destroy", KILLED, 1, status=0),
    Loss("destroy", STOPPED, 0, status=0),
]


def lose(losses: Sequence[Loss], folder: Path) -> dict[Loss, Ended]:
    """Run a job for each loss and return how they ended; a rank that did not end in time has status -1.

    One job starts after the other, and what follows from the losses, which is mostly waiting, goes on side by side.
    """
    source = folder / "saved"
    if any(loss.moment == "load" for loss in losses):
        run_ok(source, [*BASE, "train.exit_interval=2"])
    load = [f"checkpoint.load={source}/checkpoints/iter_0000002", "checkpoint.reshard=true"]
    jobs = {}
    with ExitStack() as stack:
        for number, loss in enumerate(losses):
            job = standing(
                folder / f"run{number}",
                [*BASE, loss.topology, *(load if loss.moment == "load" else [])],
                moment=loss.moment,
                iteration=ITERATION.get(loss.moment, 0),
                ranks=2,
                gated=[loss.rank],
                deed=loss.deed,
            )
            jobs[loss], gate = stack.enter_context(job)
            gate.await_reached()
        for loss, running in jobs.items():
            with suppress(TimeoutError):
                running.join(BOUND_S, but=[loss.rank])
        return {loss: running.ended() for loss, running in jobs.items()}


def assert_named(loss: Loss, ended: Ended) -> None:
    """Hold the other rank to its status, and to a message that names the lost one."""
    assert ended.statuses[1 - loss.rank] == loss.status, ended.text
    assert loss.status == 0 or f"rank {loss.rank}" in ended.outputs[1 - loss.rank].lower(), ended.text


def test_a_killed_rank_is_named_soon(tmp_path: Path) -> None:
    loss = Loss("forward", KILLED)
    assert_named(loss, lose([loss], tmp_path)[loss])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(scope="module")
def outcomes(root: Path) -> dict[Loss, Ended]:
    return lose(LOSSES, root)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda loss: f"{loss.moment}-{loss.deed}-{loss.rank}-{loss.topology.partition('.')[2]}"
)
def test_the_other_rank_ends_soon_and_names_the_lost_one(outcomes: dict[Loss, Ended], loss: Loss) -> None:
    assert_named(loss, outcomes[loss])


@pytest.mark.slow
@pytest.mark.nightly
def test_no_loss_leaves_half_a_checkpoint(root: Path, outcomes: dict[Loss, Ended]) -> None:
    committed = list(root.glob("run*/checkpoints/iter_*"))
    assert len(committed) >= 2 * sum(loss.moment in ("exit", "destroy") for loss in outcomes)
    assert all((path / "manifest.json").exists() for path in committed)
