"""What a checkpoint has of an optimizer beside its tensors' bytes: parameter groups, and tensors not made yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from trainer.checkpoint.format.json_file import Json
from trainer.checkpoint.format.layout import TensorSpec
from trainer.checkpoint.loading.reader import Checkpoint
from trainer.checkpoint.tensors.live import local_of, parameter_names
from trainer.errors import MismatchError


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Json]:
    """Return the parameter groups: the names of their parameters, and their numbers, such as learning rates."""
    names = parameter_names(model)
    return [
        {
            "names": [names[parameter] for parameter in group["params"] if parameter in names],
            "numbers": {k: v for k, v in group.items() if k != "params" and is_plain_number(v)},
        }
        for group in optimizer.param_groups
    ]


def set_groups(model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[Json]) -> None:
    """Set each parameter group's numbers from the saved group that held its first parameter."""
    names = parameter_names(model)
    by_name = {name: group["numbers"] for group in saved for name in group["names"]}
    for group in optimizer.param_groups:
        numbers = by_name.get(names[group["params"][0]], {}) if group["params"] else {}
        for key, value in numbers.items():
            if key in group:
                group[key] = tuple(value) if isinstance(value, list) and isinstance(group[key], tuple) else value


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


def make_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, specs: Mapping[str, TensorSpec], *, where: Path
) -> None:
    """Make the optimizer state that the checkpoint has and the optimizer lacks, as zeros, without a fake step.

    Raises:
        MismatchError: as `zeros_for`.
    """
    by_name = {name: parameter for parameter, name in parameter_names(model).items()}
    on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
    for full_name, spec in specs.items():
        key, _, name = full_name.partition(".")
        parameter = by_name.get(name)
        if parameter is not None and key not in optimizer.state[parameter]:
            optimizer.state[parameter][key] = zeros_for(parameter, key, spec, on_device=on_device, where=where)


def zeros_for(parameter: nn.Parameter, key: str, spec: TensorSpec, *, on_device: bool, where: Path) -> torch.Tensor:
    """Return zeros for what a checkpoint has as `key` of a parameter, placed as optimizers place it.

    Args:
        on_device: whether state of another shape than the parameter's lies on its device.

    Raises:
        MismatchError: for state that is larger than a square matrix over a dimension of its parameter, the largest
            that optimizers keep: memory is not for the asking.
    """
    most = max(parameter.numel(), max(parameter.shape, default=1) ** 2)
    if math.prod(spec.shape) > most:
        raise MismatchError(
            "The checkpoint has optimizer state that is too large for its parameter",
            where=f"{where}, tensor {spec.name}",
            expected=f"at most {most} elements",
            found=f"shape {list(spec.shape)}",
            fix="Load the model alone.",
        )
    if spec.shape == tuple(parameter.shape) and key != "step":
        return torch.zeros_like(parameter.detach())
    device = local_of(parameter).device if on_device else torch.device("cpu")
    return torch.zeros(spec.shape, dtype=torch.float32, device=device)


def is_plain_number(value: object) -> bool:
    """Return whether a value of a parameter group is a number, text, a boolean, None or a list of numbers."""
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, (int, float)) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
