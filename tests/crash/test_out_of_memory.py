"""A run whose host has no memory left ends with the keys that need less, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import troubles
from tests.crash.outcomes import saved
from tests.harness import TINY

MICRO_BATCH = "train.micro_batch_size=5000"  # whose logits take 82 MB


@pytest.mark.slow
def test_a_host_without_memory_is_named_with_what_needs_less(tmp_path: Path) -> None:
    sizes = ("model=gpt2_tiny", "model.n_layer=1", "train.global_batch_size=5000", MICRO_BATCH)
    saves = ("checkpoint.save_interval=1", "checkpoint.async_save=false")
    ended = troubles.train(tmp_path, [*TINY, *sizes, *saves], {"name": "no memory", "iteration": 2})
    assert ended.statuses == (1,)
    assert "(rank 0, cpu), found " in ended.text
    assert f"{MICRO_BATCH} or train.seq_length=16" in ended.text
    assert "Traceback" not in ended.text
    assert saved(tmp_path) == [1]
