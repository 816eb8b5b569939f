"""The least memory of a run, and a failed allocation, named with the keys that need less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.config import Stage
from reprise.errors import ConfigError, LaunchError
from reprise.ranks import single_rank_channel
from tests.messages import says
from trainer.config.compose import compose
from trainer.launch import device
from trainer.launch.process_group import Cluster
from trainer.memory.dry_run import report
from trainer.memory.needs import out_of_memory, require_memory
from trainer.parallel.topology import Topology
from trainer.run.parallelize import build_stage

CPU = torch.device("cpu")


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


BATCH = ["train.micro_batch_size=1", "parallel=zero1"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["model=llama3_405b"], "at least 4535.8 GiB for 405,853,388,800 parameters"),
        (["model=llama3_405b", "optimizer.moments_dtype=bfloat16"], "at least 3779.8 GiB"),
        (["model=llama3_405b", "train.freeze=[*]"], "at least 1511.9 GiB"),
        (["model.vocab_size=100000000000"], "memory of the host"),
        (["model.pad_vocab_multiple=100000000000"], "1 of 1 rank"),
    ],
)
def test_a_model_that_the_host_does_not_hold_is_refused(words: list[str], name: str) -> None:
    config, cluster = compose(words), Cluster(0, 1, CPU, 1, single_rank_channel(), nonce="", local_ranks=(0,))
    models = [build_stage(config, stage=Stage.whole(config.model.n_layer), topology=Topology(1, 1, 1), mesh=None)]
    with pytest.raises(ConfigError, match=name):  # the message has this host's memory
        require_memory(models, config, cluster)
    require_memory([], config, cluster)


@pytest.mark.parametrize(("limit", "is_least"), [("4096\n", True), ("max\n", False), (None, False)])
def test_a_control_group_limits_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None, is_least: bool
) -> None:
    monkeypatch.setattr(device, "_MEMORY_LIMIT", tmp_path / "memory.max")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert (device.memory_bytes(CPU) == 4096) is is_least


def test_a_dry_run_reports_averages_and_rounded_moments() -> None:
    large = ["model=llama3_1b", "data=stdlib", *BATCH, "train.ema_decay=0.9"]
    averaged = report(compose(large), 2)
    assert "9.21 GiB  9.21 GiB" in averaged  # state, working
    rounded = report(compose([*large, "optimizer.moments_dtype=bfloat16"]), 2)
    assert "6.91 GiB  9.21 GiB" in rounded
    assert "; a checkpoint has 14,829," in rounded  # 4 + 2 + 2 + 4 bytes of each of 1,235,814,400 parameters
