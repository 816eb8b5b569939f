"""A global batch that the ranks cannot divide: `train.micro_batch_size=auto`, and shares that differ within copies.

`test_topologies.py` has four ranks that share six micro batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.harness import TINY, curve, run_ok

pytestmark = pytest.mark.slow

AUTO = (
    *("model=gpt2_tiny", *TINY, "train.global_batch_size=8", "train.micro_batch_size=auto"),
    *("train.train_iters=6", "train.eval_interval=3", "train.eval_iters=2", "checkpoint.save_interval=3"),
)

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
