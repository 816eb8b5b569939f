"""A rank that is killed or hangs at any moment: the others end in bounded time, with a status, and name it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.moments import KILLED, STOPPED, standing
from tests.harness import TINY, run_ok

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
ITERATION = {"forward": 2, "save": 2, "prepare": 2}


@dataclass(frozen=True, slots=True)
class Loss:
    """What becomes of which of two ranks, and when; `status` is how the other is to end."""

    moment: str
    deed: str
    rank: int = 1
    topology: str = "parallel=zero1"
    status: int = 1


LOSSES = [
    Loss("meet", STOPPED, 0),
    Loss("meet", KILLED, 0),
    *(Loss(moment, deed) for moment in ("meet", "group", "data", "build", "load") for deed in (KILLED, STOPPED)),
    Loss("forward", KILLED, 0, "parallel=zero3"),
    Loss("forward", STOPPED, 1, "parallel=zero3"),
    Loss("forward", KILLED, 1, "parallel=pp2"),
    Loss("forward", STOPPED, 0, "parallel=pp2"),
    Loss("forward", STOPPED, 1, "parallel=tp2"),
    Loss("save", KILLED),
    Loss("save", STOPPED),
    Loss("prepare", STOPPED, 0),
    Loss("exit", KILLED),
    Loss("exit", STOPPED),
    # After the last barrier all is saved, and all ranks know: the other has done what it was to do.
    Loss("destroy", KILLED, 1, status=0),
    Loss("destroy", STOPPED, 0, status=0),
]


def lose(losses: Sequence[Loss], folder: Path) -> None:
    """Run a job for each loss, and hold the other rank to its status and to a message that names the lost one.

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
            ended, other = running.ended(), 1 - loss.rank
            assert ended.statuses[other] == loss.status, (loss, ended.text)
            assert loss.status == 0 or f"rank {loss.rank}" in ended.outputs[other].lower(), (loss, ended.text)


def test_a_killed_rank_is_named_soon(tmp_path: Path) -> None:
    lose([Loss("forward", KILLED)], tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_lost_rank_is_named_and_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    lose(LOSSES, tmp_path)
    committed = list(tmp_path.glob("run*/checkpoints/iter_*"))
    assert len(committed) >= 2 * sum(loss.moment in ("exit", "destroy") for loss in LOSSES)
    assert all((path / "manifest.json").exists() for path in committed)
