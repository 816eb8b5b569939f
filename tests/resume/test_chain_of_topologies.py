"""With `parallel.invariant_ranks`, a run that moves between topologies is the run that stayed on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import TINY, curve, launch, run_ok, tensor_files

pytestmark = pytest.mark.slow

# Two passes per lane, so that the order within a lane counts as well as the tree.
RUN = (
    "model=gpt2_tiny",
    *TINY,
    "model.dropout=0.1",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "train.train_iters=30",
    "train.eval_interval=5",
    "train.eval_iters=2",
    "train.threads=1",
    "parallel.invariant_ranks=4",
    "checkpoint.save_interval=10",
    "checkpoint.reshard=true",
)
PP2 = "parallel.pipeline_model_parallel_size=2"
SHARDS = (
    *RUN,
    "model.n_head=4",
    "model.pad_vocab_multiple=4",
    "parallel.invariant_tensor_ranks=4",
)


def evaluations(folder: Path) -> list[tuple[int, str]]:
    """Return the bits of every recorded validation loss with its iteration."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["iteration"], row["valid_loss_hex"]) for row in rows if row.get("event") == "evaluation"]


def test_killed_and_moved_twice_it_equals_the_run_on_one_rank(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    run_ok(whole, RUN)
    # Each kill comes two iterations after a save: these are trained again, on other ranks.
    legs = [(4, "parallel.zero_stage=3", 10), (1, "parallel.zero_stage=1", 20)]
    for ranks, topology, saved in legs:
        killed = launch(moved, [*RUN, topology], ranks=ranks, kill_after=saved + 2, saved=saved)
        assert set(killed.statuses) == {-9}, killed.text
    last = run_ok(moved, [*RUN, PP2], ranks=2)
    assert "iteration 20 from" in last.outputs[0]
    assert "parallel.pipeline_model_parallel_size: saved 1, now 2" in last.text

    assert_equal(moved, whole)


@pytest.mark.nightly
def test_moved_over_tensor_ranks_it_equals_the_run_on_one_rank(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    run_ok(whole, SHARDS)
    legs = [
        (4, ["parallel.tensor_model_parallel_size=4", "parallel.sequence_parallel=true"], 10),
        (4, ["parallel.tensor_model_parallel_size=2", PP2], 20),
    ]
    for ranks, topology, saved in legs:
        killed = launch(moved, [*SHARDS, *topology], ranks=ranks, kill_after=saved + 2, saved=saved)
        assert set(killed.statuses) == {-9}, killed.text
    last = run_ok(moved, [*SHARDS, "parallel.zero_stage=3"], ranks=2)
    assert "iteration 20 from" in last.outputs[0]
    effect = "weights and moments stay bitwise, and so does the loss curve"
    assert f"parallel.tensor_model_parallel_size: saved 2, now 1; {effect}" in last.text
    assert_equal(moved, whole)


def assert_equal(moved: Path, whole: Path) -> None:
    assert [row[0] for row in curve(whole)] == list(range(1, 31))
    assert curve(moved) == curve(whole)
    assert [iteration for iteration, _ in evaluations(whole)] == [5, 10, 15, 20, 25, 30]
    assert evaluations(moved) == evaluations(whole)
    for name in ("iter_0000010", "iter_0000020", "iter_0000030"):
        assert tensor_files(moved / "checkpoints" / name) == tensor_files(whole / "checkpoints" / name)
