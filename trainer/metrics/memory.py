"""A rank's memory use."""

from __future__ import annotations

import resource
from typing import NamedTuple

import torch

_KIB = 1024  # Linux reports a process's peak in KiB, see getrusage(2)


class MemoryPeaks(NamedTuple):
    """A rank's peak memory in bytes since the start. 0 means not recorded.

    Attributes:
        host_peak: The process's peak resident memory.
        device_peak: Peak tensor memory on the accelerator.
        device_reserved: Peak memory reserved there by torch's allocator.
    """

    host_peak: int
    device_peak: int = 0
    device_reserved: int = 0

    @property
    def limiting(self) -> int:
        """The rank's limiting memory in bytes: reserved memory on an accelerator, the host's peak on a CPU."""
        return self.device_reserved or self.host_peak


def rank_memory(device: torch.device) -> MemoryPeaks:
    """Return this rank's memory peaks, without waiting for the device."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    if device.type == "cpu":
        return MemoryPeaks(host)
    module = torch.get_device_module(device)
    names = ("max_memory_allocated", "max_memory_reserved")
    return MemoryPeaks(host, *(int(getattr(module, name)(device)) if hasattr(module, name) else 0 for name in names))
