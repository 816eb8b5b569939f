from __future__ import annotations

import torch

from trainer.metrics.memory import MemoryPeaks, rank_memory


def test_a_process_on_a_cpu_has_the_peak_of_its_host() -> None:
    memory = rank_memory(torch.device("cpu"))
    assert memory.host_peak > 10_000_000
    assert memory == MemoryPeaks(memory.host_peak, 0, 0)


def test_the_memory_that_limits_is_that_of_the_device() -> None:
    assert (MemoryPeaks(9).limiting, MemoryPeaks(9, 2, 3).limiting) == (9, 3)
