"""The trainer itself, killed at calls to the file system, resumes bit by bit. `matrix.py` kills at every call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.killing import AFTER, BEFORE, trained_until_killed
from tests.harness import TINY, checkpoint, curve, run_ok, tensor_files
from tests.profiles import nightly

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "model.dropout=0.1",
    "train.train_iters=6",
    "checkpoint.save_interval=2",
    "checkpoint.max_checkpoint_keep=1",
)
WEIGHTS = ("checkpoint.save_steps=[0,1,3]", "checkpoint.save_weights_interval=2")


def weights_of(run: Path) -> dict[str, dict[str, bytes]]:
    """Return the tensor files of each save of the weights alone; a later launch may have superseded one."""
    paths = [path for path in (run / "checkpoints/weights").glob("iter_*") if path.suffix == ""]
    return {path.name: tensor_files(path) for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides", "kills"),
    [
        (1, WEIGHTS, 4),
        (2, ("parallel=zero3",), 2),
        nightly(1, (), 4),
        nightly(2, ("parallel=tp2",), 2),
    ],
)
def test_kills_of_the_trainer_are_survived(tmp_path: Path, ranks: int, overrides: tuple[str, ...], kills: int) -> None:
    settings, whole = [*BASE, *overrides], tmp_path / "whole/run"
    assert trained_until_killed(whole, settings, ranks=ranks) == 0
    for number in range(kills):
        victim = number % ranks
        calls = int((whole.parent / f"calls{victim}").read_text())
        run = tmp_path / f"killed-{number}/run"
        at, when = (2 * number + 1) * calls // (2 * kills), (BEFORE, AFTER)[number // 2 % 2]
        assert trained_until_killed(run, settings, ranks=ranks, victim=victim, at=at, when=when) == -9
        run_ok(run, settings, ranks=ranks)
        assert curve(run) == curve(whole)
        assert tensor_files(checkpoint(run, 6)) == tensor_files(checkpoint(whole, 6))
        assert weights_of(run) == weights_of(whole)
        assert list((run / "checkpoints").rglob(".*")) == []
