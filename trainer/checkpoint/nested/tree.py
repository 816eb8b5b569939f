"""Takes a nested state dict apart into tensors, JSON values and parameter groups, and puts values back in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.format.json_file import Json
from trainer.checkpoint.nested.numbered import is_optimizer_state, names_of
from trainer.checkpoint.nested.stored_names import Keys, pointer
from trainer.checkpoint.optimizer_state import is_plain_number
from trainer.checkpoint.tensors.live import is_dtensor
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
    """The state dict of an optimizer within a nested one.

    Args:
        names: the name of each parameter, by the name or the number that `state` and `groups` give it.
        state: `given["state"]`, in which a load makes what is missing where parameters have numbers.
    """

    names: Mapping[str | int, str]
    groups: list[ParameterGroup]
    state: dict[Any, dict[str, Any]]

    @property
    def is_numbered(self) -> bool:
        """Return whether parameters have numbers."""
        return any(isinstance(given, int) for given in self.names)


@dataclass(frozen=True, slots=True)
class Tree:
    """A nested state dict by leaf.

    Args:
        entries: its outermost keys.
        tensors: by keys, in the order of the dict.
        values: everything else, by JSON Pointer; a list that holds no tensor is one value.
        optimizers: by JSON Pointer.
        places: the container and the key of each value.
    """

    entries: tuple[str, ...]
    tensors: dict[Keys, torch.Tensor] = field(default_factory=dict)
    values: Json = field(default_factory=dict)
    optimizers: dict[str, OptimizerState] = field(default_factory=dict)
    places: dict[str, tuple[_Container, str | int]] = field(default_factory=dict)

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
        if any("\ud800" <= character <= "\udfff" for character in key):
            raise CheckpointError("A key cannot be stored as UTF-8", where=repr(keys), found=repr(key))
    if is_optimizer_state(found):
        _take_optimizer(tree, found, keys, model)
        found = {key: value for key, value in found.items() if key not in ("state", "param_groups")}
    for key, value in found.items():
        _walk(tree, value, (*keys, key), (found, key), model)


def _walk(tree: Tree, value: object, keys: Keys, place: tuple[_Container, str | int], model: nn.Module | None) -> None:
    if isinstance(value, torch.Tensor):
        tree.tensors[keys] = _plain(value, keys)
    elif isinstance(value, dict):
        _walk_dict(tree, value, keys, model)
    elif isinstance(value, (list, tuple)) and _holds_tensor(value):
        for number, member in enumerate(value):
            _walk(tree, member, (*keys, str(number)), (value, number), model)
    else:
        _require_json(value, keys)
        tree.values[pointer(keys)] = value
        tree.places[pointer(keys)] = place


def _take_optimizer(tree: Tree, found: dict[str, Any], keys: Keys, model: nn.Module | None) -> None:
    names = names_of(found, model, where=pointer(keys) or "the state dict")
    groups = []
    for number, group in enumerate(found["param_groups"]):
        numbers = {}
        for key, value in group.items():
            inner = (*keys, "param_groups", str(number), str(key))
            if isinstance(value, torch.Tensor):
                tree.tensors[inner] = _plain(value, inner)
            elif key not in ("params", "param_names"):
                numbers[key] = _plain_number(value, inner)
        groups.append(ParameterGroup([names[given] for given in group["params"]], numbers, group))
    for given, values in found["state"].items():
        _walk_dict(tree, values, (*keys, "state", names[given]), model)
    tree.optimizers[pointer(keys)] = OptimizerState(names, groups, found["state"])


def _plain_number(value: object, keys: Keys) -> object:
    if not is_plain_number(value):
        raise CheckpointError(
            "A parameter group holds a value that is no number",
            where=pointer(keys),
            expected="a number, text, a boolean, None, a list of numbers, or a tensor",
            found=type(value).__name__,
        )
    return value


def _plain(tensor: torch.Tensor, keys: Keys) -> torch.Tensor:
    own = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if own and not is_dtensor(tensor):
        raise CheckpointError(
            "A tensor is of a class that keeps its memory elsewhere",
            where=pointer(keys),
            expected="a plain tensor or a DTensor",
            found=type(tensor).__name__,
            fix="Give its parts as tensors of their own.",
        )
    return tensor.detach()


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


def _require_json(value: object, keys: Keys) -> None:
    if value is None or isinstance(value, (bool, int, str)):
        return
    if isinstance(value, float) and math.isfinite(value):
        return
    if isinstance(value, (list, tuple)):
        for number, member in enumerate(value):
            _require_json(member, (*keys, str(number)))
        return
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for key, member in value.items():
            _require_json(member, (*keys, key))
        return
    has_state = hasattr(value, "state_dict")
    raise CheckpointError(
        "A state dict holds a value that is neither a tensor nor JSON",
        where=pointer(keys),
        expected="a tensor, a finite number, text, a boolean, None, or a list or dict of them with text as keys",
        found=repr(value) if isinstance(value, (float, dict)) else type(value).__name__,
        fix="Give its state_dict()." if has_state else "Give numbers as Python's own, and arrays as tensors.",
    )
