"""The nested state dict of a model and its optimizer: live tensors by parameter name, parameter groups, and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.nested.stored_names import MODEL, OPTIMIZER, pointer
from trainer.checkpoint.nested.tree import Tree, add_optimizer, add_tensor, take_apart
from trainer.checkpoint.tensors.live import canonical_name, free_gathered_parameters, parameter_names
from trainer.errors import CheckpointError


def tree_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, state: Mapping[str, object] | None = None
) -> Tree:
    """Return a model as `"model"`, its optimizer as `"optimizer"`, and the values of `state` under their own keys.

    Frees gathered FSDP2 parameters first: `named_parameters()` are the optimizer's only then.

    Raises:
        CheckpointError: naming a value of `state` that is not JSON, a key of it that the model or the optimizer has, an
            optimizer whose parameters are not the model's, or optimizer state that cannot be stored.
    """
    tree = take_apart(dict(state or {}))
    _require_values(tree)
    free_gathered_parameters(model)
    for name, tensor in _named_tensors(model):
        add_tensor(tree, (MODEL, name), tensor)
    tree.entries += (MODEL,)
    if optimizer is not None:
        _add_optimizer(tree, model, optimizer)
    return tree


def _require_values(tree: Tree) -> None:
    taken = {MODEL, OPTIMIZER[0]}.intersection(tree.entries)
    if taken:
        raise CheckpointError(
            "`state` has a key that stands for the model or the optimizer",
            found=", ".join(sorted(taken)),
            fix="Rename it.",
        )
    if tree.tensors:
        raise CheckpointError(
            "`state` holds a tensor, and its values are JSON",
            where=f"`state`, {pointer(next(iter(tree.tensors)))}",
            fix="Register it as a buffer of the model, or save a nested state dict by `save_state_dict`.",
        )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers in the order of the model, tied ones under each of their names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield canonical_name(name), parameter
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield canonical_name(f"{prefix}.{name}" if prefix else name), buffer


def _add_optimizer(tree: Tree, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = parameter_names(model)
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strangers = sum(parameter not in names for parameter in given)
    if strangers:
        raise CheckpointError(
            "The optimizer holds parameters that are not the model's",
            found=f"{strangers} of them",
            fix="Build the optimizer after the model is wrapped (fully_shard, parallelize_module, to).",
        )
    unnamed: list[Any] = [key for key in optimizer.state if key not in given]
    if unnamed:
        raise CheckpointError(
            "The optimizer has state that belongs to none of its parameters",
            found=f"key {unnamed[0]!r}" if isinstance(unnamed[0], str) else f"key of type {type(unnamed[0]).__name__}",
            fix="Give the state under a parameter, or save it in `state`.",
        )
    names = {parameter: names[parameter] for parameter in names if parameter in given}
    add_optimizer(
        tree,
        OPTIMIZER[:1],
        names=names,
        groups=optimizer.param_groups,
        state=optimizer.state,
        parameters={name: parameter for parameter, name in names.items()},
    )
    tree.entries += OPTIMIZER[:1]
    tree.optimizer_class = type(optimizer).__name__
