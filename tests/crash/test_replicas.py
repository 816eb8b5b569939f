"""A bit that flips in one replica of a tensor while training: the run ends, and no checkpoint of it is committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.crash import troubles
from tests.harness import TINY, Ended, call_on_ranks, launch

pytestmark = pytest.mark.slow

TABLE, NORM = "transformer.wte.weight", "transformer.ln_f.weight"
BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=8", "checkpoint.save_interval=2")
# layout: overrides, the tensor of which the last rank and one in the first half have a copy
LAYOUTS = {
    "zero0": (("parallel.zero_stage=0",), TABLE),
    "zero0 moments": (("parallel.zero_stage=0",), f"exp_avg_sq.{TABLE}"),
    "tp2 norm": (("parallel.tensor_model_parallel_size=2",), NORM),
    "zero3, replicated step": (("parallel.zero_stage=3",), f"step.{TABLE}"),
    "zero3, copies of a shard": (("parallel.zero_stage=3", "parallel.replicate=2", "train.micro_batch_size=1"), TABLE),
}
SOAK = ("zero0 moments", "zero3, replicated step")


def ranks_of(layout: str) -> int:
    return 4 if "copies" in layout else 2


def train_with_a_flip(folder: Path, layout: str, *more: str, during: int = 6) -> Ended:
    overrides, name = LAYOUTS[layout]
    ranks = ranks_of(layout)
    told = {"name": "flipped bit", "rank": ranks - 1, "begins": during, "ends": during + 1, "tensor": name}
    arguments = [json.dumps(told), f"run.dir={folder}", *BASE, *overrides, *more]
    return call_on_ranks(troubles.main, arguments, folder=folder, ranks=ranks)


def iterations(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("iter_*"))


@pytest.mark.parametrize(
    ("layout", "is_async"),
    [
        *(pytest.param(layout, True, marks=pytest.mark.nightly if layout in SOAK else ()) for layout in LAYOUTS),
        ("zero0", False),
    ],
)
def test_a_flipped_bit_ends_the_run_before_the_next_commit(tmp_path: Path, layout: str, is_async: bool) -> None:
    ended = train_with_a_flip(tmp_path, layout, f"checkpoint.async_save={str(is_async).lower()}")
    assert all(ended.statuses), ended.text
    assert "hold different bits" in ended.text
    assert LAYOUTS[layout][1] in ended.text
    ranks = ranks_of(layout)
    assert f"rank {ranks // 2 - 1} against rank {ranks - 1}" in ended.text
    assert iterations(tmp_path) == ["iter_0000002", "iter_0000004"]
    # What was committed before is whole, and the same command goes on from it.
    resumed = launch(tmp_path, [*BASE, *LAYOUTS[layout][0]], ranks=ranks)
    assert resumed.ok, resumed.text
    assert iterations(tmp_path)[-1] == "iter_0000008"


def test_an_interval_finds_it_between_saves(tmp_path: Path) -> None:
    more = ("checkpoint.save_interval=0", "checkpoint.check_replicas=0", "train.check_replicas_interval=3")
    ended = train_with_a_flip(tmp_path, "zero0", *more, during=2)
    assert all(ended.statuses), ended.text
    assert "hold different bits" in ended.text
    assert TABLE in ended.text
    assert "step     3" in ended.text
    assert "step     4" not in ended.text


def test_every_second_save_is_checked_where_the_interval_says_so(tmp_path: Path) -> None:
    ended = train_with_a_flip(tmp_path, "zero0", "checkpoint.check_replicas=2")
    assert all(ended.statuses), ended.text
    assert iterations(tmp_path) == ["iter_0000002", "iter_0000004", "iter_0000006"]
    assert "hold different bits" in ended.text
