"""What a run leaves in its checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from reprise.files import Files
from reprise.folder import CheckpointFolder
from tests.harness import TINY, curve, launch, run_ok

BASE = ["model=gpt2_tiny", *TINY, "train.train_iters=10", "schedule.lr_decay_iters=20", "checkpoint.save_interval=1"]
KEEP = "checkpoint.max_checkpoint_keep=2"


def entries(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def folder(*iterations: int) -> list[str]:
    names = [f"iter_{iteration:07d}" for iteration in iterations]
    return [*names, "latest_checkpointed_iteration.txt", "lock"]


def committed(run: Path) -> list[int]:
    return CheckpointFolder(run / "checkpoints", Files()).committed()


def tracked(run: Path) -> int:
    return int((run / "checkpoints/latest_checkpointed_iteration.txt").read_text())


def test_two_of_ten_stay_whether_the_run_was_resumed_or_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = run_ok(run, [*BASE, KEEP])
    assert ended.text.count("saved iteration") == 10
    assert entries(run) == folder(9, 10)
    assert tracked(run) == 10

    run_ok(run, [*BASE, KEEP, "train.train_iters=14"])
    assert entries(run) == folder(13, 14)
    assert [row[0] for row in curve(run)] == list(range(1, 15))


def test_multiples_of_the_retain_interval_stay(tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*BASE, KEEP, "checkpoint.save_retain_interval=4"], ranks=2)
    assert entries(tmp_path / "run") == folder(4, 8, 9, 10)


def test_without_a_bound_all_stay(tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*BASE, "checkpoint.save_interval=3"])
    assert entries(tmp_path / "run") == folder(3, 6, 9, 10)


def test_an_interval_of_zero_saves_only_at_the_end(tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*BASE, "checkpoint.save_interval=0"])
    assert entries(tmp_path / "run") == folder(10)


def test_with_saving_off_there_is_no_folder_and_no_second_start(tmp_path: Path) -> None:
    overrides = [*BASE, "checkpoint.save=null", "checkpoint.save_interval=0"]
    ended = run_ok(tmp_path / "run", overrides)
    assert "saved" not in ended.text
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.yaml",
        "launches.jsonl",
        "lock",
        "metrics.jsonl",
    ]

    again = launch(tmp_path / "run", overrides)
    assert again.statuses == (1,)
    assert "checkpoint.save is null" in again.text
    assert "checkpoint.load=none" in again.text


def test_a_named_iteration_stays_while_its_command_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ok(run, [*BASE, "checkpoint.max_checkpoint_keep=3", "train.exit_interval=6"])
    rewind = [*BASE, KEEP, "checkpoint.ckpt_step=4"]
    run_ok(run, [*rewind, "train.exit_interval=8"])
    assert committed(run) == [4, 7, 8]
    ended = run_ok(run, [*rewind, "train.exit_interval=7"])
    assert "iteration 4 from" in ended.text
    assert committed(run) == [4, 6, 7]
    run_ok(run, [*BASE, KEEP])
    assert committed(run) == [9, 10]


def test_full_steps_stay_with_their_moments(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rare = "checkpoint.save_interval=4"
    run_ok(
        run,
        [*BASE, rare, "checkpoint.max_checkpoint_keep=1", "checkpoint.full_steps=[3]", "checkpoint.no_save_optim=true"],
    )
    assert committed(run) == [3, 10]
    has_moments = [bool(list((run / f"checkpoints/iter_{n:07d}").glob("*optim*"))) for n in (3, 10)]
    assert has_moments == [True, False]
