"""A failed allocation is named with the keys that need less memory."""

from __future__ import annotations

import pytest
import torch

from reprise.errors import LaunchError
from trainer.config.compose import compose
from trainer.run.memory_needs import out_of_memory


def cpu_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    return caught.value


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (
            cpu_error(),
            "The host has no memory left for this run (rank 1), found DefaultCPUAllocator: can't allocate mem",
        ),
        (MemoryError("Unable to allocate 9 TiB"), "The host has no memory left for this run (rank 1), found Unable to"),
        (MemoryError(), "The host has no memory left for this run (rank 1), found MemoryError. Lower"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"),
            "The device has no memory left for this run (rank 1)",
        ),
    ],
)
def test_a_failed_allocation_names_what_needs_less(error: BaseException, what: str) -> None:
    config = compose(["model=gpt2_tiny", "train.micro_batch_size=12", "train.seq_length=77"])
    found = out_of_memory(error, config, where="rank 1")
    assert str(found).startswith(what)
    assert (
        "Lower train.micro_batch_size=12 or train.seq_length=77, set train.activation_checkpointing=true, or use more "
        "ranks. train.dry_run=true shows the memory of every rank."
    ) in str(found)
    config.train.activation_checkpointing = True
    assert "activation_checkpointing" not in str(out_of_memory(error, config, where="rank 1"))
    assert out_of_memory(found or error, config, where="rank 1") is None


@pytest.mark.parametrize("error", [RuntimeError("shape"), LaunchError("Rank 1 failed: x"), KeyboardInterrupt()])
def test_any_other_error_is_left_alone(error: BaseException) -> None:
    assert out_of_memory(error, compose(["model=gpt2_tiny"]), where="rank 0") is None
