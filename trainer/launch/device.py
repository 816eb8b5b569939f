"""The device of a rank, under torch's names for every accelerator; ROCm's are `cuda`."""

from __future__ import annotations

import torch

from reprise.errors import LaunchError, count_of
from trainer.parallel.topology import ACCELERATORS

CPU = "cpu"


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device of a rank, and make it the current device of this thread.

    Args:
        name: `cpu`, the type of an accelerator, or `auto` for the accelerator of this host, if any.

    Raises:
        LaunchError: if this rank has no device of the type.
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
    """Return the maker's name of an accelerator, as in `NVIDIA H200`, or `cpu`."""
    if device.type == CPU:
        return CPU
    return str(torch.get_device_module(device).get_device_name(device))


def memory_bytes(device: torch.device) -> int:
    """Return the size of an accelerator's memory in bytes."""
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
