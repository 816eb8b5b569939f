"""Another source of data in the middle of a run: where it begins, and that a later resume goes on there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from reprise.errors import TrainerError
from tests.harness import TINY, call_on_ranks, checkpoint, curve, run_ok, state_of, tensor_files
from tests.messages import refused
from tests.resume.random_tokens import SEED, SIZES, state, train_and_note_windows, windows_read
from tests.resume.starts import start
from tests.sample_order import sample_ids

BASE = (
    *TINY,
    "model=gpt2_tiny",
    "data=token_file",
    "model.vocab_size=257",
    "train.global_batch_size=8",
    "train.batch_schedule=0:4 16:8",  # 4, 8, 12, 16, 24, 32, 40
    "schedule.lr_decay_iters=15",
    "schedule.lr_warmup_iters=1",
)
OTHER = "checkpoint.override_data=true"
START = "data.position=start"


def run_of(data: Path, name: str, iterations: int, *more: str) -> list[str]:
    return [*BASE, f"data.train={data}/{name}.bin", f"train.train_iters={iterations}", *more]


def train_noting(run: Path, overrides: list[str]) -> str:
    """Train, note the windows that are read, and return what the run said."""
    ended = call_on_ranks(train_and_note_windows, [str(run), *overrides], folder=run, ranks=1)
    assert ended.ok, ended.text
    return ended.text


def ids(name: str, count: int) -> list[int]:
    """Return the first samples of a source in the order of training."""
    numbers: list[int] = sample_ids(0, count, epoch_size=SIZES[name], seed=SEED).tolist()
    return numbers


def test_a_new_source_begins_at_its_start_once(data: Path) -> None:
    run, whole = data / "run", data / "whole"
    for name, iterations, more in (("a", 3, []), ("b", 5, [OTHER, START]), ("b", 6, [START]), ("b", 7, [])):
        train_noting(run, run_of(data, name, iterations, *more))
    read = windows_read(data)
    assert [sample for _, name, sample in read if name == "a"] == ids("a", 12)
    assert [sample for _, name, sample in read if name == "b"] == ids("b", 4 + 3 * 8)
    run_ok(whole, run_of(data, "a", 3))
    run_ok(whole, run_of(data, "b", 7, OTHER, START))
    assert curve(run) == curve(whole)
    assert tensor_files(checkpoint(run, 7)) == tensor_files(checkpoint(whole, 7))
    assert state_of(checkpoint(run, 7)) == state_of(checkpoint(whole, 7))


def test_a_new_source_goes_on_at_the_position_and_says_so(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = data / "run"
    run_ok(run, run_of(data, "a", 3))
    with refused(TrainerError, START):
        start(run, *run_of(data, "c", 5))
    start(run, *run_of(data, "c", 5, OTHER))
    assert "other samples, at its own position unless data.position=start" in caplog.text
    # A start that is repeated from the same checkpoint, as after a death before the first save, is the same.
    curves = []
    for _ in range(2):
        run_ok(run, run_of(data, "b", 4, OTHER, START, "checkpoint.ckpt_step=3"))
        curves.append(curve(run))
    assert curves[0] == curves[1]


def test_skipped_samples_are_passed_over_once(data: Path) -> None:
    run = data / "run"
    phases = [(3, "2-5,14-18"), (5, "14-18,20-25,40-41"), (6, ""), (7, "3-4,50-52")]
    texts = []
    for iterations, ranges in phases:
        text = train_noting(run, run_of(data, "a", iterations, f"train.skip_samples=[{ranges}]"))
        texts.append([line for line in text.splitlines() if "train.skip_samples:" in line])
    passed = {2, 3, 4, 14, 15, 16, 17, 20, 21, 22, 23, 24, 50, 51}
    order = ids("a", 60)
    assert [sample for _, _, sample in windows_read(data)] == [order[n] for n in range(60) if n not in passed][:40]
    assert texts == [
        [],
        ["train.skip_samples: from position 19 on, 20-25, 40-41 is skipped; before, it was none"],
        ["train.skip_samples: from position 36 on, none is skipped; before, it was 40-41"],
        ["train.skip_samples: from position 44 on, 50-52 is skipped; before, it was none"],
    ]
    train_noting(run, run_of(data, "b", 8, OTHER, START, "train.skip_samples=[56-58]"))
    order = ids("b", 10)
    assert [sample for number, _, sample in windows_read(data) if number == 8] == [*order[:2], *order[4:]]
    saved = state(run, 7)
    assert (saved["consumed_samples"], saved["skipped"]) == (40, [[2, 5], [14, 18], [20, 25], [50, 52]])
