"""Moving averages in host memory: a thread moves them after each step, from parameters on any device."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn

from reprise.tensors import local_of, with_memory
from trainer.optim.adamw import stored_names
from trainer.optim.average import Pairs, finish_move, local_pairs, moves
from trainer.optim.table import AVERAGE

# How many elements are moved at once: fits a processor's cache; one device transfer into 16 MiB of pinned memory.
_ITEMS_CPU, _ITEMS_DEVICE = 1 << 16, 1 << 22


def keep_average_on_host(
    optimizer: torch.optim.Optimizer, model: nn.Module, decay: float, memory: Mapping[str, torch.Tensor]
) -> None:
    """Make an optimizer average its parameters in host memory, see `average.keep_average`.

    A thread moves the averages after each step, and the next step waits for it. Parameters do not change between two
    steps, so they need no copy.
    """
    for parameter, name in stored_names(model).items():
        if parameter in optimizer.state:
            optimizer.state[parameter][AVERAGE] = _zeros_on_host(parameter, memory.get(f"{AVERAGE}.{name}"))
    thread = ThreadPoolExecutor(1, thread_name_prefix="moving-average")
    optimizer.register_step_pre_hook(finish_move)
    optimizer.register_step_post_hook(partial(_begin_move, thread, 1 - decay))


def _zeros_on_host(parameter: nn.Parameter, local: torch.Tensor | None) -> torch.Tensor:
    """Return zeros with a parameter's placements, in the given memory or in pinned memory."""
    like = parameter.detach()
    part = local_of(like)
    if local is None:
        local = torch.zeros(part.shape, dtype=part.dtype, pin_memory=part.device.type != "cpu")
    return with_memory(like, local)


def _begin_move(thread: ThreadPoolExecutor, share: float, optimizer: torch.optim.Optimizer, *_: object) -> None:
    pairs = local_pairs(optimizer)
    device = next((parameter.device for _, parameter in pairs), torch.device("cpu"))
    if device.type == "cpu":
        moves[optimizer] = thread.submit(_move, share, pairs, _ITEMS_CPU)
        return
    module = torch.get_device_module(device)
    step_is_over = module.Event()
    step_is_over.record()
    moves[optimizer] = thread.submit(_move_from_device, share, pairs, module, step_is_over)


def _move_from_device(share: float, pairs: Pairs, module: Any, step_is_over: Any) -> None:
    """Move averages on a separate stream, during the next iteration's passes."""
    with module.stream(module.Stream(pairs[0][1].device)):
        module.current_stream().wait_event(step_is_over)
        _move(share, pairs, _ITEMS_DEVICE, pin_memory=True)


@torch.no_grad()
def _move(share: float, pairs: Pairs, items: int, *, pin_memory: bool = False) -> None:
    """Move averages toward the parameters by a share of their difference, with the bits of `average.move_averages`."""
    largest = max((average.numel() for average, _ in pairs), default=0)
    memory = torch.empty(min(items, largest), pin_memory=pin_memory)
    for average, parameter in pairs:
        for lo in range(0, average.numel(), items):
            part = average[lo : lo + items]
            difference = memory[: part.numel()].copy_(parameter[lo : lo + items])
            part.add_(difference.sub_(part).mul_(share))
