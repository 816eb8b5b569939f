"""The nested state dict of a model and its optimizer: live tensors by parameter name, parameter groups, and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.nested.stored_names import MODEL, OPTIMIZER, Keys, pointer
from trainer.checkpoint.nested.tree import Tree, add_optimizer, add_tensor, take_apart, walk
from trainer.checkpoint.nested.typed_values import DICTS
from trainer.checkpoint.tensors.live import canonical_name, free_gathered_parameters, parameter_names
from trainer.errors import CheckpointError

_EXTRA_STATE = "_extra_state"  # torch's name for it in a state dict
_NOTHING = object()


def tree_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, state: Mapping[str, object] | None = None
) -> Tree:
    """Return a model as `"model"`, its optimizer as `"optimizer"`, and the values of `state` under their own keys.

    Frees gathered FSDP2 parameters first: `named_parameters()` are the optimizer's only then.

    Raises:
        CheckpointError: naming a value of `state` that cannot be stored, a key of it that the model or the optimizer
            has, an optimizer whose parameters are not the model's, or optimizer state that cannot be stored.
    """
    tree = take_apart(dict(state or {}))
    _require_values(tree)
    free_gathered_parameters(model)
    for name, tensor in _named_tensors(model):
        add_tensor(tree, (MODEL, name), tensor)
    _add_extra_state(tree, model)
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
    for where, kind in tree.classes.items():
        if kind not in DICTS.values():
            raise CheckpointError(
                "`state` holds a dict of a class that a load cannot make",
                where=f"`state`, {where}",
                expected=", ".join(DICTS),
                found=kind.__name__,
                fix="Give dict(value).",
            )
    if tree.tensors:
        raise CheckpointError(
            "`state` holds a tensor",
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


def _add_extra_state(tree: Tree, model: nn.Module) -> None:
    """Add what modules give by `get_extra_state`, which they take back at the end of a load."""
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        name = canonical_name(f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE)
        holder = {name: module.get_extra_state()}
        walk(tree, holder[name], (MODEL, name), (holder, name))
        tree.after_load.append(partial(_give_back, module, holder))


def _give_back(module: nn.Module, holder: Mapping[str, object]) -> None:
    (extra_state,) = holder.values()
    module.set_extra_state(extra_state)


def _add_optimizer(tree: Tree, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = parameter_names(model)
    _refuse_further_state(optimizer)
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
        defaults=optimizer.defaults,
    )
    tree.entries += OPTIMIZER[:1]
    tree.optimizer_class = type(optimizer).__name__


def _refuse_further_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose own `state_dict()` gives anything beyond its groups and the state of its parameters.

    Raises:
        CheckpointError: naming it.
    """
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return
    given = dict(optimizer.state_dict())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    state = {number: optimizer.state[p] for number, p in enumerate(parameters) if p in optimizer.state}
    given["param_groups"] = [{**group, "params": None} for group in given.get("param_groups", ())]
    difference = _difference(given, {"state": state, "param_groups": groups}, OPTIMIZER[:1])
    if difference is not None:
        raise CheckpointError(
            "An optimizer has a state_dict() of its own, which is not its groups and its parameters' state",
            where=pointer(difference),
            found=type(optimizer).__name__,
            fix="Save what it holds beside them in `state`, or the whole dict by `save_state_dict`.",
        )


def _difference(given: object, base: object, keys: Keys) -> Keys | None:
    """Return the keys of the first member in which two nested values differ; None for equal ones."""
    if isinstance(given, torch.Tensor) and isinstance(base, torch.Tensor):
        same = given is base or (given.dtype == base.dtype and given.shape == base.shape and torch.equal(given, base))
        return None if same else keys
    if isinstance(given, Mapping) and isinstance(base, Mapping):
        members = [(key, given.get(key, _NOTHING), base.get(key, _NOTHING)) for key in {**base, **given}]
    elif isinstance(given, (list, tuple)) and isinstance(base, (list, tuple)) and len(given) == len(base):
        members = [(number, *pair) for number, pair in enumerate(zip(given, base, strict=True))]
    else:
        return None if type(given) is type(base) and (given is base or given == base) else keys
    inner = (_difference(one, other, (*keys, str(key))) for key, one, other in members)
    return next((found for found in inner if found is not None), None)
