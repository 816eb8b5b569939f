"""A global batch that the ranks cannot divide: some ranks have a micro batch more, and the mean is over all samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.harness import TINY, curve, run_ok

pytestmark = pytest.mark.slow

# Four micro batches: one for each of four ranks; two, one and one for three.
BASE = (
    *("model=gpt2_tiny", *TINY, "model.dropout=0.1", "train.global_batch_size=8", "train.micro_batch_size=2"),
    *("train.train_iters=6", "train.eval_interval=3", "train.eval_iters=2", "checkpoint.save_interval=3"),
)
AUTO = (*BASE, "model.dropout=0.0", "train.micro_batch_size=auto")

Figures: TypeAlias = tuple[list[float], list[float], list[float]]


def figures(folder: Path) -> Figures:
    """Return the losses, gradient norms and validation losses of a run."""
    rows, lines = curve(folder), (folder / "metrics.jsonl").read_text().splitlines()
    events = [row for row in map(json.loads, lines) if row.get("event") == "evaluation"]
    losses, norms = ([float.fromhex(row[column]) for row in rows] for column in (1, 2))
    return losses, norms, [float.fromhex(row["valid_loss_hex"]) for row in events]


def assert_close(a: Path, b: Path) -> None:
    for found, expected in zip(figures(a), figures(b), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unbroken run of four ranks."""
    folder = tmp_path_factory.mktemp("four") / "run"
    run_ok(folder, [*BASE, "parallel.zero_stage=3"], ranks=4)
    return folder


@pytest.mark.parametrize(
    "zero_stage", [pytest.param(stage, marks=[pytest.mark.nightly] if stage in (1, 2) else []) for stage in range(4)]
)
def test_three_of_four_ranks_go_on(four: Path, tmp_path: Path, zero_stage: int) -> None:
    shutil.copytree(four, tmp_path / "three")
    three = [*BASE, f"parallel.zero_stage={zero_stage}", "checkpoint.reshard=true", "checkpoint.ckpt_step=3"]
    ended = run_ok(tmp_path / "three", three, ranks=3)
    assert (
        "3 data-parallel ranks share 4 micro-batches of train.micro_batch_size=2: at most 2 on a rank, 1.33 on average"
        in ended.outputs[0]
    )
    # The micro batches are the same, so dropout draws the same masks.
    assert_close(tmp_path / "three", four)


def test_auto_moves_with_the_ranks(tmp_path: Path) -> None:
    ended = run_ok(tmp_path / "run", [*AUTO, "train.exit_interval=3"], ranks=3)
    assert "train.micro_batch_size=auto: 1\n" in ended.outputs[0]
    ended = run_ok(tmp_path / "run", [*AUTO, "checkpoint.reshard=true"], ranks=2)
    assert "train.micro_batch_size=auto: 4\n" in ended.outputs[0]
    assert "train.micro_batch_size: saved 1, now 4" in ended.outputs[0]
    run_ok(tmp_path / "one", [*AUTO, "train.micro_batch_size=8"])
    assert_close(tmp_path / "run", tmp_path / "one")


@pytest.mark.nightly
def test_shares_differ_within_copies_too(tmp_path: Path) -> None:
    copies = ["parallel.zero_stage=3", "parallel.replicate=3"]
    ended = run_ok(tmp_path / "six", [*AUTO, *copies], ranks=6)
    assert "6 data-parallel ranks share 8 micro-batches of train.micro_batch_size=1" in ended.outputs[0]
    run_ok(tmp_path / "one", [*AUTO, "train.micro_batch_size=8"])
    assert_close(tmp_path / "six", tmp_path / "one")
