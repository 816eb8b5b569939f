"""Collectives of the simulated device: gloo, on the memory of its tensors, after the work of the current stream.

As with nccl, a group takes tensors of the device alone, and every rank may have a device of its own. Unlike with nccl,
a call of a collective returns when it is done, so a missing wait for one goes unnoticed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.distributed_c10d import PrefixStore, Store

from tests.simulated.register import NAME

# By their names in all releases of torch that the trainer supports.
_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


class SimulatedGroup(dist.ProcessGroup):
    """The ranks of a group, whose messages gloo carries."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)
        cpu = torch.device("cpu")
        self._gloo = dist.ProcessGroup(store, rank, world_size)
        gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self._gloo._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, gloo)
        self._name = ""

    @property
    def pg_name(self) -> str:
        """Return the name that torch has for the group."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        """Return the name that torch has for the group."""
        return self.pg_name

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo._get_backend(torch.device("cpu"))

    def getBackendName(self) -> str:
        return NAME

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Start sending tensors, which the caller keeps until it has waited."""
        return self._gloo.send(on_host(tensors), rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Start receiving tensors, which the caller keeps until it has waited."""
        return self._gloo.recv(on_host(tensors), rank, tag)


def _collective(name: str) -> Callable[..., Any]:
    def call(self: SimulatedGroup, *values: Any, **names: Any) -> Any:
        hosts = [on_host(value) for value in values], {key: on_host(value) for key, value in names.items()}
        work = getattr(self._gloo, name)(*hosts[0], **hosts[1])
        if work is not None:
            work.wait()
        done = torch.futures.Future()
        done.set_result(values[0] if values else None)
        return _create_work_from_future(done)

    call.__name__ = name
    return call


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(SimulatedGroup, _name, _collective(_name))


def on_host(value: Any) -> Any:
    """Return tensors, or lists of them, as tensors of the CPU over the same memory, after pending writes.

    Raises:
        ValueError: for a tensor of the CPU, as from nccl.
    """
    if isinstance(value, list | tuple):
        return [on_host(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != NAME:
        raise ValueError(f"a group of {NAME} devices got a tensor on {value.device}")
    torch.accelerator.current_stream(value.device).synchronize()
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    memory = (ctypes.c_ubyte * value.untyped_storage().nbytes()).from_address(value.untyped_storage().data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def _make(store: PrefixStore, rank: int, world_size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(store, rank, world_size, timeout)


def register_collectives() -> None:
    """Let torch take these collectives for tensors of the device."""
    dist.Backend.register_backend(NAME, _make, devices=[NAME])
