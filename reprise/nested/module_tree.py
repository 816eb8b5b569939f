"""The nested state dict of a model and its optimizer: live tensors by parameter name, parameter groups, and values."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from reprise.errors import CheckpointError
from reprise.nested.folder_files import folder_files
from reprise.nested.module_entries import add_entries
from reprise.nested.pretrained import add_pretrained
from reprise.nested.stateful import Stateful, is_stateful
from reprise.nested.stored_names import MODEL, OPTIMIZER, PER_RANK, Keys, pointer
from reprise.nested.tree import (
    Tree,
    add_object,
    add_optimizer,
    add_tensor,
    build_tree,
    require_text_keys,
    walk,
)
from reprise.nested.typed_values import DICTS
from reprise.tensors.live import free_gathered_parameters, named_tensors, parameter_names

_NOTHING = object()


def tree_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    state: Mapping[str, object] | None = None,
    *,
    of_rank: tuple[int, list[dict[str, Any]]] | None = None,
    files: Mapping[str, object] | None = None,
    is_load: bool = False,
) -> Tree:
    """Return a model as `"model"`, its optimizer as `"optimizer"`, and the values of `state` under their own keys.

    Args:
        of_rank: a rank and the dicts of its own values; None without any.
        files: see `folder_files`.
        is_load: build the tree for a load, which replaces the values in `state`, a dict, and gives objects their state.

    Raises:
        CheckpointError: naming an unstorable value of `state`, a key of it reserved for the model or the optimizer, an
            optimizer whose parameters are not the model's, or unstorable optimizer state.
    """
    state = {} if state is None else state if isinstance(state, dict) else dict(state)
    tree = build_tree(state, is_load=is_load, refers=not is_load)
    _require_values(tree)
    objects: dict[Keys, Stateful] = {(MODEL,): model}
    if optimizer is not None:
        objects[OPTIMIZER[:1]] = optimizer
    for keys, value in objects.items():
        if not is_stateful(value):
            raise CheckpointError(
                "This is neither a model nor an optimizer",
                where=pointer(keys),
                found=type(value).__name__,
                fix="Give the module or the optimizer itself; `save_state_dict` and `load_state_dict` take dicts.",
            )
    tree.entries += tuple(key for (key,) in objects)
    tree.objects = objects | tree.objects
    if of_rank is not None:
        rank, containers = of_rank
        tree.entries += (PER_RANK,)
        for container in containers:
            require_text_keys(container, (PER_RANK,))
            for key, value in container.items():
                walk(tree, value, (PER_RANK, str(rank), key), (container, key))
    add_objects(tree)
    if not is_load:
        add_pretrained(tree, model)
        tree.files |= folder_files(files)
    return tree


def tree_of_dict(
    state_dict: object,
    *,
    model: nn.Module | None = None,
    files: Mapping[str, object] | None = None,
    is_load: bool = False,
) -> Tree:
    """Return the tree of a nested state dict with the objects in it; see `build_tree` and `add_objects`."""
    tree = build_tree(state_dict, model=model, is_load=is_load)
    add_objects(tree)
    if not is_load:
        add_pretrained(tree, tree.objects.get((MODEL,), model))
        tree.files |= folder_files(files)
    return tree


def add_objects(tree: Tree) -> None:
    """Add the objects of a tree: live tensors of modules and optimizers, and the state of all others.

    Frees gathered FSDP2 parameters first: `named_parameters()` are the optimizers' only then.

    Raises:
        CheckpointError: naming an unstorable value, or an optimizer of parameters outside the modules of the tree.
    """
    modules = {keys: value for keys, value in tree.objects.items() if isinstance(value, nn.Module)}
    for keys, module in modules.items():
        _refuse_flat_shards(keys, module)
        free_gathered_parameters(module)
    for keys, value in tree.objects.items():
        if isinstance(value, nn.Module):
            for name, tensor in named_tensors(value):
                add_tensor(tree, (*keys, name), tensor)
            add_entries(tree, keys, value)
        elif isinstance(value, torch.optim.Optimizer):
            _add_optimizer(tree, keys, modules, value)
    for keys in sorted(tree.objects):  # in one order on all ranks, as objects may communicate
        value = tree.objects[keys]
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            continue
        add_object(tree, keys, value.state_dict, value.load_state_dict)


def _require_values(tree: Tree) -> None:
    reserved = {MODEL, OPTIMIZER[0], PER_RANK}.intersection(tree.entries)
    if reserved:
        raise CheckpointError(
            "`state` has a key that stands for the model, the optimizer or what each rank has of its own",
            found=", ".join(sorted(reserved)),
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


def _refuse_flat_shards(keys: Keys, model: nn.Module) -> None:
    """Refuse FSDP1: on each rank its parameters are plain tensors of other elements, and do not tell which.

    Raises:
        CheckpointError: naming the sharded module.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, module in model.named_modules():
        if not isinstance(module, fsdp.FullyShardedDataParallel):
            continue
        if module.sharding_strategy != fsdp.ShardingStrategy.NO_SHARD:
            raise CheckpointError(
                "A module is sharded by FSDP1, so that its parameters are parts of a flat tensor",
                where=pointer((*keys, name) if name else keys),
                expected="a plain, DDP, FSDP2 or tensor-parallel module",
                found=type(module).__name__,
                fix="Wrap it with device_mesh=, give get_model_state_dict and get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict, and after a load set_state_dict.",
            )


def _add_optimizer(tree: Tree, keys: Keys, modules: Mapping[Keys, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    _refuse_further_state(optimizer)
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names = _names_in(modules, parameters)
    strangers = sum(parameter not in names for parameter in parameters)
    if strangers:
        raise CheckpointError(
            "The optimizer holds parameters that are not the model's",
            where=None if keys == OPTIMIZER[:1] else pointer(keys),
            found=f"{strangers} of them",
            fix="Build the optimizer after the model is wrapped (fully_shard, parallelize_module, to), and give the "
            "modules of all its parameters.",
        )
    unnamed: list[Any] = [key for key in optimizer.state if key not in parameters]
    if unnamed:
        raise CheckpointError(
            "The optimizer has state that belongs to none of its parameters",
            found=f"key {unnamed[0]!r}" if isinstance(unnamed[0], str) else f"key of type {type(unnamed[0]).__name__}",
            fix="Give the state under a parameter, or save it in `state`.",
        )
    add_optimizer(
        tree,
        keys,
        names=names,
        groups=optimizer.param_groups,
        state=optimizer.state,
        parameters={name: parameter for parameter, name in names.items()},
        defaults=optimizer.defaults,
    )
    if keys == OPTIMIZER[:1]:
        tree.optimizer_class = type(optimizer).__name__


def _names_in(modules: Mapping[Keys, nn.Module], parameters: Collection[nn.Parameter]) -> dict[nn.Parameter, str]:
    """Return the names of the parameters of an optimizer: those in the first module with all of them.

    Where none has, a name begins with the keys of the module.
    """
    names: dict[nn.Parameter, str] = {}
    for keys, module in modules.items():
        names_in_module = {
            parameter: name for parameter, name in parameter_names(module).items() if parameter in parameters
        }
        if len(names_in_module) == len(parameters):
            return names_in_module
        for parameter, name in names_in_module.items():
            names.setdefault(parameter, ".".join((*keys, name)))
    return names


def _refuse_further_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose own `state_dict()` gives anything beyond its groups and the state of its parameters.

    Raises:
        CheckpointError: naming it.
    """
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return
    state_dict, own_groups = dict(optimizer.state_dict()), getattr(optimizer, "param_groups", ())
    parameters = [parameter for group in own_groups for parameter in group["params"]]
    groups = [{**group, "params": None} for group in own_groups]
    state = {number: optimizer.state[p] for number, p in enumerate(parameters) if p in optimizer.state}
    state_dict["param_groups"] = [{**group, "params": None} for group in state_dict.get("param_groups", ())]
    difference = _difference(state_dict, {"state": state, "param_groups": groups}, OPTIMIZER[:1])
    if difference is not None:
        raise CheckpointError(
            "An optimizer has a state_dict() of its own, which is not its groups and its parameters' state",
            where=pointer(difference),
            found=type(optimizer).__name__,
            fix="Save what it holds beside them in `state`, or the whole dict by `save_state_dict`.",
        )


def _difference(value: object, base: object, keys: Keys) -> Keys | None:
    """Return the keys of the first member in which two nested values differ; None for equal ones."""
    if isinstance(value, torch.Tensor) and isinstance(base, torch.Tensor):
        same = value is base or (value.dtype == base.dtype and value.shape == base.shape and torch.equal(value, base))
        return None if same else keys
    if isinstance(value, Mapping) and isinstance(base, Mapping):
        members = [(key, value.get(key, _NOTHING), base.get(key, _NOTHING)) for key in {**base, **value}]
    elif isinstance(value, (list, tuple)) and isinstance(base, (list, tuple)) and len(value) == len(base):
        members = [(number, *pair) for number, pair in enumerate(zip(value, base, strict=True))]
    else:
        return None if type(value) is type(base) and (value is base or value == base) else keys
    inner = (_difference(member, base_member, (*keys, str(key))) for key, member, base_member in members)
    return next((keys_of_difference for keys_of_difference in inner if keys_of_difference is not None), None)
