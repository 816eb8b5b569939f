"""A run whose host has no memory left ends with the keys that need less, and loses nothing."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import pytest
import torch

import trainer.__main__
from tests.harness import TINY, around_iterations, call_on_ranks
from trainer.run.build import Run

SAMPLES = 5000  # whose logits take 82 MB
_BLOCK_BYTES = 8 << 20
_taken = list[torch.Tensor]()


def _leave_nothing(_run: Run, iteration: int) -> None:
    if iteration == 2:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with contextlib.suppress(RuntimeError):
            while True:
                _taken.append(torch.empty(_BLOCK_BYTES, dtype=torch.uint8))
        del _taken[-2:]


def train_in_little_memory(arguments: list[str]) -> None:
    around_iterations(before=_leave_nothing)
    sys.argv = ["trainer", *arguments]
    trainer.__main__.main()


@pytest.mark.slow
def test_a_host_without_memory_is_named_with_what_needs_less(tmp_path: Path) -> None:
    sizes = [
        f"train.global_batch_size={SAMPLES}",
        f"train.micro_batch_size={SAMPLES}",
        "checkpoint.save_interval=1",
        "checkpoint.async_save=false",
    ]
    command = [*TINY, "model=gpt2_tiny", "model.n_layer=1", f"run.dir={tmp_path / 'run'}", *sizes]
    ended = call_on_ranks(train_in_little_memory, command, folder=tmp_path / "log", ranks=1)
    assert ended.statuses == (1,)
    assert "OutOfMemoryError: The host has no memory left for this run (rank 0, cpu), found " in ended.text
    assert f"Lower train.micro_batch_size={SAMPLES} or train.seq_length=16" in ended.text
    assert "Traceback" not in ended.text
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("iter_*")] == ["iter_0000001"]
