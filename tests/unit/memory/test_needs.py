"""The least memory of a run, and a failed allocation, named with the keys that need less."""

from __future__ import annotations

import pytest
import torch

from reprise.errors import ConfigError, LaunchError
from tests.messages import refused, says
from trainer.config.compose import compose
from trainer.memory.dry_run import report
from trainer.memory.needs import host_bytes, out_of_memory, require_memory


def cpu_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    return caught.value


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (cpu_error(), "host"),
        (MemoryError("Unable to allocate 9 TiB"), "host"),
        (MemoryError(), "host"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "device"),
    ],
    ids=["torch", "text", "no text", "device"],
)
def test_a_failed_allocation_names_what_needs_less(error: BaseException, place: str) -> None:
    config = compose(["model=gpt2_tiny", "train.micro_batch_size=12", "train.seq_length=77"])
    refusal = out_of_memory(error, config, where="rank 1")
    assert str(refusal).startswith(f"The {place} has no memory left for this run (rank 1)")
    says(str(refusal))
    config.train.activation_checkpointing = True
    assert "activation_checkpointing" not in str(out_of_memory(error, config, where="rank 1"))
    assert out_of_memory(refusal or error, config, where="rank 1") is None


@pytest.mark.parametrize("error", [RuntimeError("shape"), LaunchError("Rank 1 failed: x"), KeyboardInterrupt()])
def test_any_other_error_is_left_alone(error: BaseException) -> None:
    assert out_of_memory(error, compose(["model=gpt2_tiny"]), where="rank 0") is None


def test_a_host_s_memory_is_that_of_its_control_group_and_swap() -> None:
    meminfo = "MemTotal:       2048 kB\nMemFree:  1 kB\nSwapTotal:      1024 kB\n"
    assert host_bytes(meminfo) == 3 << 20
    assert host_bytes(meminfo, "1048576\n") == 2 << 20
    assert host_bytes(meminfo, "max\n") == 3 << 20
    assert host_bytes("") is None


PARAMETERS, TOKENS = 859_008, 8 * 8 * 129
BATCH = ["train.micro_batch_size=1", "parallel=zero1"]


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ([], 8),
        (["parallel.zero_stage=0"], 16),
        (["optimizer.moments_dtype=bfloat16"], 6),
        (["train.ema_decay=0.9", "optimizer.moments_dtype=bfloat16"], 8),
    ],
)
def test_a_host_with_less_than_the_least_memory_is_refused(words: list[str], size: int) -> None:
    config = compose([*BATCH, *words])
    needed = 2 * size * PARAMETERS + TOKENS
    require_memory(config, 2, ranks=2, available_bytes=needed, where="here")
    with refused(ConfigError, "here (2 of 2 ranks)"):
        require_memory(config, 2, ranks=2, available_bytes=needed - 1, where="here")


def test_a_dry_run_reports_what_stands_on_the_host() -> None:
    large = ["model=llama3_1b", "data=stdlib", *BATCH, "train.ema_decay=0.9"]
    averaged = report(compose(large), 2)
    assert "9.21 GiB  9.21 GiB" in averaged  # state, working
    rounded = report(compose([*large, "optimizer.moments_dtype=bfloat16"]), 2)
    assert "6.91 GiB  9.21 GiB" in rounded
    assert "; a checkpoint has 14,829," in rounded  # 4 + 2 + 2 + 4 bytes of each of 1,235,814,400 parameters
    light = report(compose([*BATCH, "checkpoint.save_steps=[0]"]), 2)
    assert ["weights-only saves" in text for text in (light, averaged)] == [True, False]
