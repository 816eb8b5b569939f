"""A bit that flips in one replica of a tensor while training: the run ends, and no checkpoint of it is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import troubles
from tests.crash.outcomes import saved
from tests.harness import TINY, run_ok
from tests.profiles import nightly

pytestmark = pytest.mark.slow

TABLE, NORM = "transformer.wte.weight", "transformer.ln_f.weight"
BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=8", "checkpoint.save_interval=2")
ZERO0, ZERO3 = ("parallel.zero_stage=0",), ("parallel.zero_stage=3",)
INLINE = "checkpoint.async_save=false"


@pytest.mark.parametrize(
    # The tensor is one of which the last rank and one in the first half have a copy.
    ("ranks", "overrides", "tensor", "during", "left"),
    [
        (2, ZERO0, TABLE, 6, [2, 4]),
        nightly(2, ZERO0, f"exp_avg_sq.{TABLE}", 6, [2, 4]),
        (2, ("parallel=tp2",), NORM, 6, [2, 4]),
        nightly(2, ZERO3, f"step.{TABLE}", 6, [2, 4]),
        nightly(4, (*ZERO3, "parallel.replicate=2", "train.micro_batch_size=1"), TABLE, 6, [2, 4]),
        (2, (*ZERO0, INLINE), TABLE, 6, [2, 4]),
        (2, (*ZERO0, "checkpoint.check_replicas=2"), TABLE, 6, [2, 4, 6]),
    ],
)
def test_a_flipped_bit_ends_the_run_before_the_next_commit(
    tmp_path: Path, ranks: int, overrides: tuple[str, ...], tensor: str, during: int, left: list[int]
) -> None:
    trouble = {"name": "flipped bit", "rank": ranks - 1, "during": during, "tensor": tensor}
    ended = troubles.train(tmp_path, [*BASE, *overrides], trouble, ranks=ranks)
    assert all(ended.statuses), ended.text
    assert "hold different bits" in ended.text
    assert tensor in ended.text
    assert saved(tmp_path) == left
    assert f"rank {ranks // 2 - 1} against rank {ranks - 1}" in ended.text
    run_ok(tmp_path, [*BASE, *overrides], ranks=ranks)  # what was committed before is whole
    assert saved(tmp_path)[-1] == 8
