"""Checks of optimizer state against an optimizer, and its initial state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from reprise.errors import MismatchError
from reprise.format.layout import TensorSpec
from reprise.loading.reader import Checkpoint
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.live import is_dtensor, local_of

_SMALL = 1 << 20  # elements, of state that any parameter may have


def check_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Refuse the optimizer state of another class: the next step of `optimizer` would fail, or be wrong.

    Raises:
        MismatchError: if the checkpoint was saved without an optimizer, or with an optimizer of another class.
    """
    if not checkpoint.has_optimizer and not checkpoint.state.get("groups"):
        raise MismatchError(
            "The checkpoint was saved without an optimizer", where=checkpoint.path, fix="Load the model alone."
        )
    record = checkpoint.state.get("optimizer", {})
    saved, current = record.get("name") if isinstance(record, dict) else record, type(optimizer).__name__
    if saved is not None and saved != current:
        raise MismatchError(
            "The checkpoint was saved with an optimizer of another class",
            where=checkpoint.path,
            expected=current,
            found=saved,
            fix=f"Pass an optimizer of class {saved}, or load the model alone.",
        )


def zeros_for(
    parameter: nn.Parameter,
    spec: TensorSpec,
    dtype: str | None,
    *,
    orders: Mapping[str, list[int]],
    elements: int,
    on_host: bool,
    where: Path,
) -> torch.Tensor:
    """Return zeros for state of a parameter in a checkpoint: of its own shape and dtype, placed as by optimizers.

    Args:
        spec: of the state in the files.
        dtype: its dtype in memory; None for that of the files.
        orders: by stored name, the dimensions from the outermost in memory, if they are not in their own order.
        elements: those of all parameters of the optimizer, which may keep flat state of all under the first.
        on_host: whether the state is a counter of steps on the host.

    Raises:
        MismatchError: for state larger than a square matrix over all elements, the largest state of optimizers: a
            checkpoint must not claim any amount of memory.
    """
    kind = torch_dtype(spec.dtype) if dtype is None else getattr(torch, dtype)
    shape = spec.shape[:-1] if dtype is not None and kind.is_complex else spec.shape
    most = max(elements**2, _SMALL)
    if math.prod(shape) > most:
        raise MismatchError(
            "The checkpoint has optimizer state that is too large for its parameter",
            where=f"{where}, tensor {spec.name}",
            expected=f"at most {most} elements",
            found=f"shape {list(shape)}",
            fix="Load the model alone.",
        )
    order = orders.get(spec.name, [])[: len(shape)]
    if order and len(order) == len(shape) and not is_dtensor(parameter):
        outermost_first = torch.zeros([shape[dim] for dim in order], dtype=kind, device=parameter.device)
        return outermost_first.permute([order.index(dim) for dim in range(len(shape))])
    if on_host or shape != tuple(parameter.shape):
        device = torch.device("cpu") if on_host else local_of(parameter).device
        return torch.zeros(shape, dtype=kind, device=device)
    return torch.zeros_like(parameter.detach(), dtype=kind)
