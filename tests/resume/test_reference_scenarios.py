"""The reference runs of configs/experiment, unbroken and resumed, under the verdict of scripts/compare_loss.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import Ended, curve, launch, tensor_files
from trainer.commands import compare_loss
from trainer.commands.frame import BAD

pytestmark = pytest.mark.slow

# Sizes that two cores train in seconds; iterations, save intervals and topologies are the experiments' own.
SMALL = (
    "model.n_head=2",
    "model.n_embd=20",
    "model.intermediate_size=44",
    "model.max_position_embeddings=32",
    "train.seq_length=16",
    "logging.tensorboard=false",
)
BITWISE = "--bitwise"
LATER = "--allow-missing-prefix"


def _run(folder: Path, experiment: str, *extra: str, ranks: int = 1) -> Ended:
    ended = launch(folder, [f"experiment={experiment}", *SMALL, *extra], ranks=ranks, timeout_s=240.0)
    assert ended.ok, ended.text
    return ended


def _saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("iter_*"))


def _verdict(base: Path, test: Path, *options: str) -> int:
    return compare_loss.main([str(base), str(test), *options])


def _names(iterations: Sequence[int]) -> list[str]:
    return [f"iter_{iteration:07d}" for iteration in iterations]


@pytest.mark.nightly
def test_over_all_axes_stopped_at_30_and_resumed(tmp_path: Path) -> None:
    unbroken, stopped = tmp_path / "unbroken", tmp_path / "stopped"
    _run(unbroken, "reference_3d", ranks=8)
    _run(stopped, "reference_3d", "train.exit_interval=30", ranks=8)
    assert _saved(stopped) == _names([10, 20, 30])
    assert _verdict(unbroken, stopped, BITWISE) == BAD  # iterations 31 to 50 are missing

    resumed = _run(stopped, "reference_3d", ranks=8)
    assert "iteration 30 from" in resumed.outputs[0]
    assert _saved(stopped) == _saved(unbroken) == _names([10, 20, 30, 40, 50])
    assert [row[0] for row in curve(unbroken)] == list(range(1, 51))
    assert _verdict(unbroken, stopped, BITWISE) == compare_loss.FINE
    for name in _saved(unbroken):
        assert tensor_files(stopped / "checkpoints" / name) == tensor_files(unbroken / "checkpoints" / name)


@pytest.mark.parametrize(
    ("experiment", "dtype"),
    [("reference_gpt2", "float32"), ("reference_llama3", "float32"), ("reference_llama3", "bfloat16")],
)
def test_resumed_from_40_in_another_folder(tmp_path: Path, experiment: str, dtype: str) -> None:
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    _run(unbroken, experiment, f"train.dtype={dtype}")
    assert _saved(unbroken) == _names([20, 40, 60, 80, 100])

    ended = _run(resumed, experiment, f"train.dtype={dtype}", f"checkpoint.load={unbroken}/checkpoints/iter_0000040")
    assert "iteration 40 from" in ended.outputs[0]
    assert [row[0] for row in curve(resumed)] == list(range(41, 101))
    assert _verdict(unbroken, resumed, BITWISE, LATER) == compare_loss.FINE
    assert _verdict(unbroken, resumed, BITWISE) == BAD
    for name in _saved(resumed):
        assert tensor_files(resumed / "checkpoints" / name) == tensor_files(unbroken / "checkpoints" / name)
    assert _saved(resumed) == _names([60, 80, 100])
