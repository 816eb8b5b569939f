"""Takes a nested state dict apart into tensors, JSON values and parameter groups, and puts values back in place."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.format.json_file import Json
from trainer.checkpoint.nested.numbered import is_optimizer_state, names_of
from trainer.checkpoint.nested.stored_names import Keys, pointer
from trainer.checkpoint.optimizer_state import is_plain_number
from trainer.checkpoint.tensors.live import is_dtensor, parameter_names
from trainer.errors import CheckpointError

_Container = dict[str, Any] | list[Any] | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One parameter group of an optimizer: the names of its parameters, and its JSON values under `numbers`.

    Args:
        given: the group itself, in which a load replaces the values.
    """

    names: list[str]
    numbers: Json
    given: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer, or its state dict, within a nested state dict.

    Args:
        keys: by the name of a parameter, its key in `state`: a name, a number, or the parameter itself.
        state: state of parameters, to which a load adds what is missing.
        parameters: by name, those whose missing state a load makes.
    """

    keys: Mapping[str, Any]
    groups: list[ParameterGroup]
    state: MutableMapping[Any, Any]
    parameters: Mapping[str, nn.Parameter]

    def lacks(self, name: str, key: str) -> bool:
        """Return whether a load makes the state `key` of a parameter, since the optimizer has none yet."""
        return name in self.parameters and key not in self.state.get(self.keys[name], {})


@dataclass(slots=True)
class Tree:
    """A nested state dict by leaf.

    Args:
        entries: its outermost keys.
        tensors: by keys, in the order of the dict.
        values: everything else, by JSON Pointer; a list that holds no tensor is one value.
        optimizers: by JSON Pointer.
        places: the container and the key of each value.
        optimizer_class: the name of the class of the optimizer under `"optimizer"`; None if only its state is given.
    """

    entries: tuple[str, ...]
    tensors: dict[Keys, torch.Tensor] = field(default_factory=dict)
    values: Json = field(default_factory=dict)
    optimizers: dict[str, OptimizerState] = field(default_factory=dict)
    places: dict[str, tuple[_Container, str | int]] = field(default_factory=dict)
    optimizer_class: str | None = None

    def replace_value(self, where: str, value: object) -> None:
        """Replace a value in its container, after `require_lists`; a tuple stays a tuple."""
        container, key = self.places[where]
        container[key] = as_given(container[key], value)  # type: ignore[index]

    def require_lists(self) -> None:
        """Refuse a value in a tuple, which cannot be filled in place.

        Raises:
            CheckpointError: naming it.
        """
        for where, (container, _) in self.places.items():
            if isinstance(container, tuple):
                raise CheckpointError("A value in a tuple cannot be filled in place", where=where, fix="Give a list.")


def as_given(given: object, value: object) -> object:
    """Return a value of a JSON file with tuples where `given` has them."""
    if isinstance(value, list):
        old = given if isinstance(given, (list, tuple)) and len(given) == len(value) else [None] * len(value)
        found = [as_given(before, after) for before, after in zip(old, value, strict=True)]
        return tuple(found) if isinstance(given, tuple) else found
    if isinstance(value, dict) and isinstance(given, Mapping):
        return {key: as_given(given.get(key), member) for key, member in value.items()}
    return value


def take_apart(state_dict: object, *, model: nn.Module | None = None) -> Tree:
    """Return a nested state dict by leaf; nothing is copied.

    Args:
        model: names the parameters of `optimizer.state_dict()`, which have numbers.

    Raises:
        CheckpointError: naming a leaf that is neither a tensor nor JSON, a key that is not text, or an optimizer whose
            parameters have numbers without names.
    """
    if not isinstance(state_dict, dict):
        raise CheckpointError("A state dict is a dict", found=type(state_dict).__name__)
    tree = Tree(tuple(map(str, state_dict)))
    try:
        _walk_dict(tree, state_dict, (), model)
    except RecursionError as error:
        raise CheckpointError("A state dict is nested too deeply", fix="Look for a dict or list in itself.") from error
    return tree


def _walk_dict(tree: Tree, found: dict[Any, Any], keys: Keys, model: nn.Module | None) -> None:
    for key in found:
        if not isinstance(key, str):
            raise CheckpointError(
                "A state dict has a key that is not text",
                where=pointer(keys) or "the outermost keys",
                found=repr(key),
                fix="JSON and file names have text only: use str(key), or a list.",
            )
        if not _is_unicode(key):
            raise CheckpointError("A key cannot be stored as UTF-8", where=repr(keys), found=repr(key))
    if is_optimizer_state(found):
        _take_optimizer(tree, found, keys, model)
        found = {key: value for key, value in found.items() if key not in ("state", "param_groups")}
    for key, value in found.items():
        _walk(tree, value, (*keys, key), (found, key), model)


def _walk(tree: Tree, value: object, keys: Keys, place: tuple[_Container, str | int], model: nn.Module | None) -> None:
    if isinstance(value, torch.Tensor):
        add_tensor(tree, keys, value)
    elif isinstance(value, dict) and value:
        _walk_dict(tree, value, keys, model)
    elif isinstance(value, (list, tuple)) and _holds_tensor(value):
        for number, member in enumerate(value):
            _walk(tree, member, (*keys, str(number)), (value, number), model)
    else:
        tree.values[pointer(keys)] = _json_copy(value, keys)
        tree.places[pointer(keys)] = place


def _take_optimizer(tree: Tree, found: dict[str, Any], keys: Keys, model: nn.Module | None) -> None:
    names = names_of(found, model, where=pointer(keys) or "the state dict")
    is_numbered = any(isinstance(given, int) for given in names)
    parameters = {} if model is None or not is_numbered else parameter_names(model)
    add_optimizer(
        tree,
        keys,
        names=names,
        groups=found["param_groups"],
        state=found["state"],
        parameters={name: parameter for parameter, name in parameters.items()},
    )


def add_optimizer(
    tree: Tree,
    keys: Keys,
    *,
    names: Mapping[Any, str],
    groups: Sequence[dict[str, Any]],
    state: MutableMapping[Any, Any],
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Add an optimizer to a tree under `keys`; see `OptimizerState`.

    Args:
        groups: its parameter groups, whose `params` are keys of `names`.

    Raises:
        CheckpointError: naming a value that is neither a tensor nor JSON.
    """
    named = []
    for number, group in enumerate(groups):
        numbers = {}
        for key, value in group.items():
            inner = (*keys, "param_groups", str(number), str(key))
            if isinstance(value, torch.Tensor):
                add_tensor(tree, inner, value)
            elif key not in ("params", "param_names"):
                numbers[key] = _plain_number(value, inner)
        named.append(ParameterGroup([names[given] for given in group["params"]], numbers, group))
    for given, values in state.items():
        _walk_dict(tree, values, (*keys, "state", names[given]), None)
    tree.optimizers[pointer(keys)] = OptimizerState(
        {name: given for given, name in names.items()}, named, state, parameters
    )


def _plain_number(value: object, keys: Keys) -> object:
    if not is_plain_number(value):
        raise CheckpointError(
            "A parameter group holds a value that is no number",
            where=pointer(keys),
            expected="a number, text, a boolean, None, a list of numbers, or a tensor",
            found=type(value).__name__,
        )
    return copy.copy(value)


def add_tensor(tree: Tree, keys: Keys, tensor: torch.Tensor) -> None:
    """Add a tensor to a tree.

    Raises:
        CheckpointError: naming it, if its class keeps its memory elsewhere.
    """
    is_foreign = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_foreign and not is_dtensor(tensor):
        raise CheckpointError(
            "A tensor is of a class that keeps its memory elsewhere",
            where=pointer(keys),
            expected="a plain tensor or a DTensor",
            found=type(tensor).__name__,
            fix="Give its parts as tensors of their own.",
        )
    tree.tensors[keys] = tensor.detach()


def _holds_tensor(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in _leaves(value))


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from _leaves(member)
    elif isinstance(value, dict):
        for member in value.values():
            yield from _leaves(member)
    else:
        yield value


def _is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which UTF-8 lacks."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _json_copy(value: object, keys: Keys) -> object:
    """Return a copy of a JSON value, which a background save stores as it is now."""
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, str) and _is_unicode(value)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (list, tuple)):
        members = [_json_copy(member, (*keys, str(number))) for number, member in enumerate(value)]
        return members if isinstance(value, list) else tuple(members)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json_copy(member, (*keys, key)) for key, member in value.items()}
    has_state = hasattr(value, "state_dict")
    raise CheckpointError(
        "A state dict holds a value that is neither a tensor nor JSON",
        where=pointer(keys),
        expected="a tensor, a finite number, text, a boolean, None, or a list or dict of them with text as keys",
        found=repr(value) if isinstance(value, (float, dict, str)) else type(value).__name__,
        fix="Give its state_dict()." if has_state else "Give numbers as Python's own, and arrays as tensors.",
    )
