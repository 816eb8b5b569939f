"""Checks of optimizer state against an optimizer, and its initial state."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from reprise.errors import MismatchError
from reprise.format.layout import TensorSpec
from reprise.loading.reader import Checkpoint
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.live import local_of


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
    key: str,
    spec: TensorSpec,
    shape: tuple[int, ...],
    *,
    flat_elements: int,
    on_device: bool,
    where: Path,
) -> torch.Tensor:
    """Return zeros for the state `key` of a parameter in a checkpoint, placed as by optimizers.

    Args:
        spec: of the state in the files.
        shape: its shape in memory.
        flat_elements: those of all parameters, where the optimizer keeps flat state of all under the first; else 0.
        on_device: whether state of another shape than the parameter's lies on its device.

    Raises:
        MismatchError: for state larger than a square matrix over a dimension of its parameter, the largest state of
            optimizers: a checkpoint must not claim any amount of memory.
    """
    most = max(parameter.numel(), max(parameter.shape, default=1) ** 2, flat_elements)
    if math.prod(shape) > most:
        raise MismatchError(
            "The checkpoint has optimizer state that is too large for its parameter",
            where=f"{where}, tensor {spec.name}",
            expected=f"at most {most} elements",
            found=f"shape {list(shape)}",
            fix="Load the model alone.",
        )
    if shape == tuple(parameter.shape) and key != "step":
        return torch.zeros_like(parameter.detach())
    device = local_of(parameter).device if on_device or flat_elements else torch.device("cpu")
    return torch.zeros(shape, dtype=torch_dtype(spec.dtype), device=device)
