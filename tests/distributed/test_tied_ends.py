"""A tied embedding whose two ends lie on different pipeline stages: two replicas, which each save compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise.errors import TrainerError
from tests.harness import TINY, built, call_on_ranks, compose, filled
from trainer.launch import process_group as launch

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "model.dropout=0.1",
    "optimizer.weight_decay=0.1",
    "train.train_iters=4",
    "parallel.pipeline_model_parallel_size=2",
)


def _spoil_one_copy(arguments: list[str]) -> None:
    """Check the copies as a save does, then again after one bit of a moment of the last stage's copy has changed."""
    run = built(compose(arguments), cluster := launch.start("cpu", deterministic=False))
    run = filled(run)
    run.restorer.check_replicas([*run.state.shards()])
    print("equal at first")
    if cluster.rank == 1:
        part = run.state.parts[0]
        part.optimizer.state[part.model.lm_head.weight]["exp_avg"][3, 3] = 1e-30
    with pytest.raises(TrainerError, match=r"exp_avg\.transformer\.wte\.weight"):
        run.restorer.check_replicas([*run.state.shards()])
    launch.shutdown(cluster)


def test_copies_that_differ_are_never_saved(tmp_path: Path) -> None:
    arguments = [*BASE, "checkpoint.save=null", "checkpoint.save_interval=0", f"run.dir={tmp_path}/run"]
    ended = call_on_ranks(_spoil_one_copy, arguments, folder=tmp_path / "run", ranks=2, timeout_s=60.0)
    assert ended.ok, ended.text
    assert all("equal at first" in output for output in ended.outputs)
