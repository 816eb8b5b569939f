"""Runs whose global batch grows. `test_bitwise_resume.py` has their bits over kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reprise.errors import TrainerError
from tests.harness import TINY, launch, run_ok
from tests.messages import refused
from tests.resume.starts import start

# Iterations of 4, 4, 4 | 8, 8 | 12, 12, 12 samples: no border is a multiple of a size before it but the first.
RAMP = ["train.batch_schedule=0:4 12:8 27:12", "train.global_batch_size=12"]
CONSUMED = [4, 8, 12, 20, 28, 40, 52, 64]
RUN = [*TINY, "model=gpt2_tiny", *RAMP, "checkpoint.save_interval=1", "checkpoint.max_checkpoint_keep=0"]
WITHOUT_WARM_UP = [override for override in RUN if not override.startswith("schedule.")]


def lines(folder: Path) -> list[dict[str, object]]:
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss_hex" in row]


@pytest.mark.slow
def test_ranks_need_not_divide_a_size_that_is_past(tmp_path: Path) -> None:
    run, moved = [*RUN, "train.batch_schedule=0:2 4:12", "train.train_iters=4"], tmp_path / "moved"
    run_ok(moved, [*run, "train.exit_interval=2"])
    run_ok(moved, [*run, "checkpoint.reshard=true"], ranks=2)
    assert [row["consumed_samples"] for row in lines(moved)] == [2, 4, 16, 28]
    later = ["train.batch_schedule=0:2 4:12 40:2 60:12", "train.train_iters=6", "checkpoint.override_batch_size=true"]
    for folder, keys, place in (
        (moved, [*run, *later, "checkpoint.override_scheduler=true"], "train.batch_schedule=40:2"),
        (tmp_path / "fresh", run, "train.batch_schedule=0:2"),
    ):
        ended = launch(folder, keys, ranks=2)
        assert not ended.ok
        assert place in ended.text
        assert "damaged" not in ended.text
    assert len(list((moved / "checkpoints").glob("iter_*"))) == 4


def test_a_run_is_as_long_as_its_samples(tmp_path: Path) -> None:
    run = [*WITHOUT_WARM_UP, *RAMP, "train.train_samples=60", "schedule.lr_warmup_samples=10"]
    ended = run_ok(tmp_path, run)
    assert [row["consumed_samples"] for row in lines(tmp_path)] == CONSUMED[:7]
    assert "the global batch size is 8 after iteration 3, it was 4" in ended.text
    # Another schedule from here on: 60 - 52 samples are left.
    changed = [*run, "train.batch_schedule=0:4", "train.global_batch_size=4"]
    with refused(TrainerError, "train.batch_schedule", "saved 0:4 12:8 27:12  current nothing"):
        start(tmp_path, *changed)
    run_ok(tmp_path, [*changed, "checkpoint.override_batch_size=true"])
    assert [row["consumed_samples"] for row in lines(tmp_path)] == [*CONSUMED[:7], 56, 60]


@pytest.mark.slow
def test_other_batches_keep_the_saved_warm_up(tmp_path: Path) -> None:
    run = [word for word in [*WITHOUT_WARM_UP, "train.train_samples=240"] if "batch_schedule" not in word]
    run_ok(tmp_path / "run", [*run, "train.exit_interval=1"])
    changed = ["train.global_batch_size=6", "checkpoint.override_batch_size=true"]
    with refused(TrainerError, "warmup_samples", "saved 120", "schedule.lr_warmup_samples=120"):
        start(tmp_path / "run", *run, *changed)
    # A command without a configuration of its own takes the warm-up too.
    load = f"checkpoint.load={tmp_path}/run/checkpoints"
    run_ok(tmp_path / "moved", [load, *changed, "train.exit_interval=2"])
    assert [row["lr"] for row in lines(tmp_path / "moved")] == [1e-3 * 18 / 120]


@pytest.mark.parametrize(
    ("overrides", "places"),
    [
        (["train.batch_schedule=0:4 12:6"], ["train.global_batch_size=12"]),
        (["train.batch_schedule=0:3 12:12"], ["train.batch_schedule=0:3", "train.micro_batch_size=2"]),
        (["train.batch_schedule=0:4 4:x"], ["'4:x'"]),
        (["parallel.invariant_ranks=2", "train.batch_schedule=0:4 12:12"], ["parallel.invariant_ranks=2"]),
        (["train.train_samples=3"], ["train.train_samples=3"]),
    ],
)
def test_sizes_that_cannot_be_are_named_before_the_start(
    tmp_path: Path, overrides: list[str], places: list[str]
) -> None:
    with refused(TrainerError, *places):
        start(tmp_path, *RUN, *overrides)
