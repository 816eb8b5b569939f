"""What a run leaves in its checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise.storage import CheckpointFolder, Files
from tests.harness import TINY, checkpoint, curve, run_ok
from tests.resume.starts import start

BASE = ["model=gpt2_tiny", *TINY, "train.train_iters=10", "schedule.lr_decay_iters=20", "checkpoint.save_interval=1"]
KEEP = "checkpoint.max_checkpoint_keep=2"


def committed(run: Path) -> list[int]:
    return CheckpointFolder(run / "checkpoints", Files()).committed()


def test_two_of_ten_stay_whether_the_run_was_resumed_or_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for last in (10, 12):
        run_ok(run, [*BASE, KEEP, f"train.train_iters={last}"])
        left = sorted(path.name for path in (run / "checkpoints").iterdir())
        kept = [checkpoint(run, number).name for number in (last - 1, last)]
        assert left == [*kept, "latest_checkpointed_iteration.txt", "lock"]
        assert int((run / "checkpoints/latest_checkpointed_iteration.txt").read_text()) == last
    assert [row[0] for row in curve(run)] == list(range(1, 13))


def test_with_saving_off_there_is_no_folder_and_a_start_begins(tmp_path: Path) -> None:
    overrides = [*BASE, "checkpoint.save=null", "checkpoint.save_interval=0", "train.train_iters=3"]
    assert "saved" not in run_ok(tmp_path / "run", overrides).text
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == ["config.yaml", "launches.jsonl", "lock", "metrics.jsonl"]
    assert start(tmp_path / "run", *overrides).state.progress.iteration == 0


@pytest.mark.slow
def test_a_named_iteration_stays_while_its_command_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ok(run, [*BASE, "checkpoint.max_checkpoint_keep=3", "train.exit_interval=6"])
    rewind = [*BASE, KEEP, "checkpoint.ckpt_step=4"]
    for last, kept in ((8, [4, 7, 8]), (7, [4, 6, 7])):
        run_ok(run, [*rewind, f"train.exit_interval={last}"])
        assert committed(run) == kept
    run_ok(run, [*BASE, KEEP])
    assert committed(run) == [9, 10]


def test_full_steps_stay_with_their_moments(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rare = ["checkpoint.save_interval=4", "checkpoint.max_checkpoint_keep=1", "checkpoint.full_steps=[3]"]
    run_ok(run, [*BASE, *rare, "checkpoint.no_save_optim=true", "train.train_iters=5"])
    assert committed(run) == [3, 5]
    assert [bool(list(checkpoint(run, number).glob("*optim*"))) for number in (3, 5)] == [True, False]
