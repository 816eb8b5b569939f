"""What fails on one rank ends all of them soon, with a status that is not 0 and a line that says why."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

import trainer.__main__
import trainer.run.build
import trainer.training.loop
from reprise.storage import Files
from tests.harness import TINY, call_on_ranks, run_ok
from trainer.run.state import TrainerState

BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=4", "checkpoint.save_interval=2")


def _fail_somewhere(arguments: list[str]) -> None:
    """Let rank 1 raise what nobody expects at one place, then run the trainer's command."""
    place, *overrides = arguments

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect of rank 1")

    if os.environ["RANK"] == "1":
        owner, name = {
            "building": (trainer.run.build, "build_models"),
            "training": (trainer.training.loop, "train_step"),
            "saving": (TrainerState, "contents"),
        }[place]
        setattr(owner, name, fail)
    sys.argv = ["trainer", *overrides]
    trainer.__main__.main()


@pytest.mark.parametrize("place", ["building", "training", "saving"])
def test_a_defect_on_one_rank_ends_all_ranks_soon(tmp_path: Path, place: str) -> None:
    arguments = [place, f"run.dir={tmp_path}/run", *BASE]
    ended = call_on_ranks(_fail_somewhere, arguments, folder=tmp_path / "run", ranks=2)
    assert ended.statuses == (1, 1)
    assert "a defect of rank 1" in ended.outputs[1]
    assert "Rank 1 failed: a defect of rank 1" in ended.outputs[0]
    assert not list((tmp_path / "run").glob("checkpoints/iter_*"))


def _fill_the_disk(arguments: list[str]) -> None:
    """Let every sync after the first checkpoint fail as a full disk does, then run the trainer's command."""
    sync = Files.sync

    def full(self: Files, descriptor: int) -> None:
        if Path(arguments[0], "checkpoints/iter_0000002").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(self, descriptor)

    Files.sync = full  # type: ignore[method-assign]
    sys.argv = ["trainer", f"run.dir={arguments[0]}", *arguments[1:]]
    trainer.__main__.main()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_last_save_fails_does_not_end_with_status_0(tmp_path: Path, ranks: int) -> None:
    run = tmp_path / "run"
    ended = call_on_ranks(_fill_the_disk, [str(run), *BASE], folder=run, ranks=ranks)
    assert ended.statuses == (1,) * ranks
    assert "No space left on device" in ended.outputs[0]
    assert [path.name for path in sorted((run / "checkpoints").glob("*iter_*"))] == ["iter_0000002"]
    again = run_ok(run, BASE, ranks=ranks)
    assert "iteration 2 from" in again.outputs[0]


def test_a_failed_save_in_between_does_not_end_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = call_on_ranks(_fill_the_disk_once, [str(run), *BASE], folder=run, ranks=2)
    assert ended.statuses == (0, 0)
    assert "iteration 2 was not saved" in ended.outputs[0]
    assert [path.name for path in sorted((run / "checkpoints").glob("*iter_*"))] == ["iter_0000004"]


def _fill_the_disk_once(arguments: list[str]) -> None:
    """Let the syncs of the first save fail on every rank, then run the trainer's command."""
    sync = Files.sync

    def full(self: Files, descriptor: int) -> None:
        if "iter_0000002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(self, descriptor)

    Files.sync = full  # type: ignore[method-assign]
    sys.argv = ["trainer", f"run.dir={arguments[0]}", *arguments[1:]]
    trainer.__main__.main()
