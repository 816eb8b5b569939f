"""Ranks of the trainer on one device, which nccl refuses: gloo, with messages from rank to rank by way of the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import trainer.__main__
from tests.cuda.devices import IS_SIMULATED, SIMULATED
from trainer.launch import process_group
from trainer.launch.device import choose_device


def train(arguments: list[str]) -> None:
    """Run the trainer's command as a rank that shares the first device with the others, over gloo."""
    share_device()
    use_gloo()
    sys.argv = ["trainer", *arguments]
    trainer.__main__.main()


def train_over_nccl(arguments: list[str]) -> None:
    """Run the trainer's command as a rank that shares the first device with the others, over nccl."""
    share_device()
    os.environ["NCCL_DEBUG"] = "WARN"  # which prints the reason of a refusal
    sys.argv = ["trainer", *arguments]
    trainer.__main__.main()


def share_device() -> None:
    """Let every rank of this host take the first device."""

    def choose(name: str, local_rank: int) -> torch.device:
        device = choose_device(name, 0)
        torch.zeros(1, device=device)  # a mesh of ranks chooses a device by LOCAL_RANK in a process that has used none
        return device

    process_group.choose_device = choose


def use_gloo() -> None:
    """Let gloo carry all messages; it reduces and gathers memory of a device, but sends none of it to one rank."""
    init, send, receive = dist.init_process_group, dist.isend, dist.irecv

    def init_gloo(backend: str, **settings: Any) -> None:
        init(SIMULATED if IS_SIMULATED else "gloo", **{**settings, "device_id": None})

    def isend(tensor: torch.Tensor, *positions: Any, **names: Any) -> Any:
        return _Work(send(host := tensor.detach().cpu().contiguous(), *positions, **names), lambda: None, host)

    def irecv(tensor: torch.Tensor, *positions: Any, **names: Any) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Work(receive(host, *positions, **names), lambda: tensor.detach().copy_(host), host)

    dist.init_process_group = init_gloo
    if IS_SIMULATED:  # whose group sends memory of its devices
        return
    for module in (dist, distributed_c10d):  # which compares an operation with its own name for it
        module.isend, module.irecv = isend, irecv


class _Work:
    """A message under way by way of memory of the host, which it keeps."""

    def __init__(self, work: Any, end: Callable[[], object], host: torch.Tensor) -> None:
        self._work, self._end, self._host = work, end, host

    def wait(self, *timeout: Any) -> bool:
        """Wait for the message, and have it on the device."""
        self._work.wait(*timeout)
        self._end()
        return True
