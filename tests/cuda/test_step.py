"""How often the host waits for a device in a step of one rank: the device is idle until the host has gone on."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from scripts.bench.subject import build_subject, config_of
from tests.cuda.devices import CUDA, OURS, SIMULATED
from tests.cuda.recorded import record
from tests.fakes import tokens_in_memory
from tests.simulated import register
from trainer.data.batches import Samples
from trainer.data.loader import BatchLoader
from trainer.launch import process_group as launch


def waits_in(call: Callable[[], object], device: torch.device) -> int:
    """Return how often the host waits for a number, or for a copy between it and the device, in a call."""
    if device.type == SIMULATED:
        before = register.host_waits()
        call()
        return register.host_waits() - before
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(each.message) for each in found)


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
@pytest.mark.parametrize("device", [*OURS, CUDA], indirect=True)
def test_the_host_waits_once_in_a_step(device: torch.device, family: str) -> None:
    cluster = launch.start(device.type, deterministic=False, threads=1, variables={})
    config = config_of(f"{family}_tiny", "train.dtype=bfloat16", samples=2, seq_length=16)
    step = build_subject(config, cluster).iteration()
    step()  # the first one makes the optimizer's state
    found = waits_in(step, device)
    record(f"waits of the host in a step of {family}", str(found))
    assert found == 1


@pytest.mark.parametrize("device", [*OURS, CUDA], indirect=True)
def test_the_host_does_not_wait_for_a_batch(device: torch.device) -> None:
    samples = Samples([tokens_in_memory(np.arange(1000, dtype=np.uint16))], seq_length=9)
    loader, batches = BatchLoader(samples, 4, 2, [0, 1], device), list[torch.Tensor]()
    loader.train_batch(0, 1, 4)  # the first pinned memory
    assert waits_in(lambda: batches.extend(loader.train_batch(4, 1, 4)), device) == 0
    on_host = BatchLoader(samples, 4, 2, [0, 1], torch.device("cpu")).train_batch(4, 1, 4)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in on_host]
