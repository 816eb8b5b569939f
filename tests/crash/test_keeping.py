"""What stays in runs of the trainer: the best by validation loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.crash import troubles
from tests.crash.outcomes import saved
from tests.harness import TINY, Ended, checkpoint
from tests.profiles import slow

BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=8", "schedule.lr_decay_iters=12", "checkpoint.save_interval=1")
KEEP_1 = "checkpoint.max_checkpoint_keep=1"
# Losses of iterations 1 to 12 as they are made up: 3 and 6 are the best of the first eight, 9 and 3 of all.
LOSSES = {"name": "losses", "values": (9.0, 5.0, 1.5, 4.0, 6.0, 2.0, 7.0, 8.0, 1.0, 3.0, 3.5, 3.6)}
on_one_rank_and_two = pytest.mark.parametrize("ranks", [1, slow(2)])


def train(run: Path, overrides: tuple[str, ...], *events: dict[str, Any], ranks: int = 1) -> Ended:
    ended = troubles.train(run, [*BASE, *overrides], *events, ranks=ranks)
    assert ended.ok, ended.text
    return ended


@on_one_rank_and_two
def test_the_best_by_validation_loss_stay_also_over_a_resume(tmp_path: Path, ranks: int) -> None:
    run, keep = tmp_path / "run", ("checkpoint.keep_best=2", KEEP_1, "train.eval_interval=1")
    train(run, keep, LOSSES, ranks=ranks)
    assert saved(run) == [3, 6, 8]
    # 9 drives out 6, which the first job kept.
    train(run, (*keep, "train.train_iters=12"), LOSSES, ranks=ranks)
    assert saved(run) == [3, 9, 12]
    state = json.loads((checkpoint(run, 9) / "trainer_state.json").read_text())
    assert (state["valid_loss"], state["best_loss"]) == (1.0, 1.0)


@pytest.mark.slow
def test_a_save_without_an_evaluation_is_not_among_the_best(tmp_path: Path) -> None:
    train(tmp_path, ("checkpoint.keep_best=2", KEEP_1, "train.eval_interval=2"), LOSSES)
    assert saved(tmp_path) == [4, 6, 8]  # 3 has the best loss of all, and nobody asked for it
