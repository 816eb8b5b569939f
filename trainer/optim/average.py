"""An exponential moving average of the parameters, which belongs to the optimizer state and is saved with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from reprise.tensors import local_of
from trainer.optim.adamw import stored_names, zeros_for
from trainer.optim.table import AVERAGE

# How many elements are moved at once: the difference stays in a processor's cache; a device needs few launches.
_ITEMS_CPU, _ITEMS_DEVICE = 1 << 16, 1 << 24


def keep_average(
    optimizer: torch.optim.Optimizer, model: nn.Module, decay: float, memory: Mapping[str, torch.Tensor]
) -> None:
    """Make an optimizer average its parameters after each step. The averages are zeros until they are filled.

    Args:
        decay: How much of the average each step keeps, from 0 to 1.
        memory: Zeros for the averages' local part, by `ema.<name>`. Averages without an entry get new memory.
    """
    for parameter, name in stored_names(model).items():
        if parameter in optimizer.state:
            optimizer.state[parameter][AVERAGE] = zeros_for(parameter, memory.get(f"{AVERAGE}.{name}"))
    optimizer.register_step_post_hook(partial(move_averages, 1 - decay))


def begin_average(
    optimizer: torch.optim.Optimizer, model: nn.Module, stored: Collection[str], names: Mapping[str, str]
) -> None:
    """Copy parameters into their averages, except averages filled from a checkpoint.

    Args:
        stored: The checkpoint's tensor names.
        names: Tied parameters' stored names, by their other names.
    """
    with torch.no_grad():
        for parameter, name in stored_names(model).items():
            if parameter in optimizer.state and f"{AVERAGE}.{names.get(name, name)}" not in stored:
                local_of(optimizer.state[parameter][AVERAGE]).copy_(local_of(parameter))


@contextmanager
def averages_in_place(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Exchange parameters and averages within the block. No save may be under way, and no parameter gathered."""
    exchanged = list(optimizers)
    for optimizer in exchanged:
        _by_chunks(optimizer, _exchange)
    try:
        yield
    finally:
        for optimizer in exchanged:
            _by_chunks(optimizer, _exchange)


def move_averages(share: float, optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Move an optimizer's averages toward the parameters, by a share of their difference."""
    _by_chunks(optimizer, partial(_move, share))


@torch.no_grad()
def _by_chunks(
    optimizer: torch.optim.Optimizer, call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
) -> None:
    """Call a function with chunks of each average and its parameter, and scratch memory of the same size."""
    memory: torch.Tensor | None = None
    for key, state in optimizer.state.items():
        average, parameter = local_of(state[AVERAGE]).view(-1), local_of(key.detach()).view(-1)
        items = _ITEMS_CPU if parameter.device.type == "cpu" else _ITEMS_DEVICE
        for lo in range(0, average.numel(), items):
            part = average[lo : lo + items]
            if memory is None or memory.numel() < part.numel():
                memory = torch.empty_like(part)
            call(part, parameter[lo : lo + items], memory[: part.numel()])


def _move(share: float, average: torch.Tensor, parameter: torch.Tensor, memory: torch.Tensor) -> None:
    # Three roundings: a fused CPU kernel would round the elements after the last whole vector differently.
    torch.sub(parameter, average, out=memory)
    average.add_(memory.mul_(share))


def _exchange(average: torch.Tensor, parameter: torch.Tensor, memory: torch.Tensor) -> None:
    memory.copy_(average)
    average.copy_(parameter)
    parameter.copy_(memory)
