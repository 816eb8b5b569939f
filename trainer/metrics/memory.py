"""The memory of ranks, in the message that a line of the log makes anyway."""

from __future__ import annotations

import resource
from typing import NamedTuple

import torch

_KIB = 1024  # the unit of Linux for the peak of a process, see getrusage(2)


class MemoryPeaks(NamedTuple):
    """Bytes of memory since the start: of one rank, or the largest of all; 0 for a device without a record.

    Attributes:
        host_peak: the peak of the process on its host.
        device_peak: the peak of tensors on its accelerator.
        device_reserved: the peak that torch's allocator reserved there.
    """

    host_peak: int
    device_peak: int = 0
    device_reserved: int = 0

    @property
    def limiting(self) -> int:
        """The bytes of the memory that a run is limited by: the accelerator's reserved, on a CPU the host's peak."""
        return self.device_reserved or self.host_peak


def rank_memory(device: torch.device) -> MemoryPeaks:
    """Return the memory of this rank. The host does not wait for the device."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    if device.type == "cpu":
        return MemoryPeaks(host)
    module = torch.get_device_module(device)
    names = ("max_memory_allocated", "max_memory_reserved")
    return MemoryPeaks(host, *(int(getattr(module, name)(device)) if hasattr(module, name) else 0 for name in names))
