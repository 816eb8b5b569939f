"""Checks of optimizer state against an optimizer, and the state that it does not have yet."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from reprise.errors import MismatchError
from reprise.loading.reader import Checkpoint
from reprise.tensors.live import local_of


def check_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizer state that `optimizer` would not understand: its next step would fail, or be wrong.

    Raises:
        MismatchError: if it was saved without an optimizer, or with one of another class.
    """
    if not checkpoint.has_optimizer and not checkpoint.state.get("groups"):
        raise MismatchError(
            "The checkpoint was saved without an optimizer", where=checkpoint.path, fix="Load the model alone."
        )
    named = checkpoint.state.get("optimizer", {})
    saved, given = named.get("name") if isinstance(named, dict) else named, type(optimizer).__name__
    if saved is not None and saved != given:
        raise MismatchError(
            "The checkpoint was saved with an optimizer of another class",
            where=checkpoint.path,
            expected=given,
            found=saved,
            fix=f"Give a {saved}, or load the model alone.",
        )


def zeros_for(
    parameter: nn.Parameter, key: str, shape: tuple[int, ...], name: str, *, on_device: bool, where: Path
) -> torch.Tensor:
    """Return zeros for what a checkpoint has as `key` of a parameter, placed as optimizers place it.

    Args:
        on_device: whether state of another shape than the parameter's lies on its device.

    Raises:
        MismatchError: for state that is larger than a square matrix over a dimension of its parameter, the largest
            that optimizers keep: memory is not for the asking.
    """
    most = max(parameter.numel(), max(parameter.shape, default=1) ** 2)
    if math.prod(shape) > most:
        raise MismatchError(
            "The checkpoint has optimizer state that is too large for its parameter",
            where=f"{where}, tensor {name}",
            expected=f"at most {most} elements",
            found=f"shape {list(shape)}",
            fix="Load the model alone.",
        )
    if shape == tuple(parameter.shape) and key != "step":
        return torch.zeros_like(parameter.detach())
    device = local_of(parameter).device if on_device else torch.device("cpu")
    return torch.zeros(shape, dtype=torch.float32, device=device)
