"""A rank's device, under torch's names for all accelerators. ROCm devices are `cuda`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from reprise.errors import LaunchError, count_of
from trainer.parallel.topology import ACCELERATORS

CPU = "cpu"
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return a rank's device, and make it this thread's current device.

    Args:
        name: `cpu`, an accelerator type, or `auto` for this host's accelerator, if any.

    Raises:
        LaunchError: This rank has no device of this type.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = None if accelerator is None else accelerator.type
    if name == "auto":
        name = kind if kind in ACCELERATORS else CPU
    if name == CPU:
        return torch.device(CPU)
    count = torch.accelerator.device_count() if kind == name else 0
    if local_rank >= count:
        raise LaunchError(
            f"This rank has no {name.upper()} device",
            where=f"local rank {local_rank}",
            expected=f"at least {count_of(local_rank + 1, 'device')}",
            found=count,
            fix="Set train.device=cpu or launch fewer ranks per node.",
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(name, local_rank)


def device_name(device: torch.device) -> str:
    """Return an accelerator's product name, such as `NVIDIA H200`, or `cpu`."""
    if device.type == CPU:
        return CPU
    return str(torch.get_device_module(device).get_device_name(device))


def memory_bytes(device: torch.device) -> int:
    """Return an accelerator's memory size in bytes, or for a CPU the host's, within its control group's limit."""
    if device.type == CPU:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with suppress(OSError, ValueError):  # no control group, or no limit
            return min(total, int(_MEMORY_LIMIT.read_text()))
        return total
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
