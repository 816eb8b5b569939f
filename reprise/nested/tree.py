"""Takes a nested state dict apart into tensors, JSON values and parameter groups, and puts values back in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from reprise.errors import CheckpointError
from reprise.format.box import Box
from reprise.format.layout import TensorKind
from reprise.json_file import Json
from reprise.nested.numbered import is_optimizer_state, names_of
from reprise.nested.stateful import ModuleEntries, Receiver, Stateful, is_stateful, leaves_of, take_out
from reprise.nested.stored_names import Keys, pointer, stored_name
from reprise.nested.typed_values import DICTS, encode, encode_number, is_unicode
from reprise.tensors.file_form import materialized, resolve
from reprise.tensors.live import is_dtensor, parameter_names

_MAX_DEPTH = 100  # what nests deeper holds itself

_Container = dict[str, Any] | list[Any] | tuple[Any, ...]
Place = tuple[_Container, str | int]


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group of an optimizer: the names of its parameters, and its values as JSON under `numbers`.

    Args:
        given: the group itself, in which a load replaces the values.
        defaults: of `numbers`, the keys with the optimizer's defaults.
    """

    names: list[str]
    numbers: Json
    given: dict[str, Any]
    defaults: frozenset[str] = frozenset()


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

    def put(self, name: str, key: str, value: object) -> None:
        """Put the state `key` of a parameter in its place."""
        self.state.setdefault(self.keys[name], {})[key] = value

    def place(self, where: str, keys: Keys) -> tuple[nn.Parameter, Callable[[torch.Tensor], None]] | None:
        """Return the parameter of a tensor that the optimizer lacks, and what puts the tensor there; else None.

        Args:
            where: the JSON Pointer of the optimizer.
            keys: of the tensor; that of a parameter group goes with the first parameter.
        """
        *parents, kind, name, key = ("", "", *keys)
        if pointer(parents[2:]) != where:
            return None
        if kind == "state" and self.lacks(name, key):
            return self.parameters[name], partial(self.put, name, key)
        if kind == "param_groups" and name.isdecimal() and int(name) < len(self.groups):
            group = self.groups[int(name)]
            if key not in group.given and (first := self.parameters.get(next(iter(group.names), ""))) is not None:
                return first, partial(group.given.__setitem__, key)
        return None


@dataclass(slots=True)
class Tree:
    """A nested state dict by leaf.

    Args:
        entries: its outermost keys.
        tensors: by keys, in the order of the dict, in the form of the files.
        dtypes: by stored name, the dtype of each tensor with another dtype in the files.
        parts: by keys, the box and the whole shape of a tensor that is a part, other than by its placement.
        meta: by keys, the given tensor and its place, of each without memory.
        values: everything else, as JSON by JSON Pointer; a list without tensors is a single value, and so is a dict
            without tensors but with keys other than text.
        classes: by JSON Pointer, the class of each dict of a subclass without tensors.
        optimizers: by JSON Pointer.
        places: the container and the key of each value.
        optimizer_class: the name of the class of the optimizer under `"optimizer"`; None if only its state is given.
        after_load: called at the end of a load.
        objects: by keys, those with a state of their own, for `add_objects`.
        receivers: by JSON Pointer, the objects with a new state at the end of a load.
        modules: by the keys of a module and the prefix of a part of it, the parts with a `state_dict()` of their own.
        files: files for other programs, by name.
        is_load: whether the tree is for a load, at whose end objects and values with tensors take their state.
        refers: whether the values have references to the tensors among them; a load needs no template then.
        stored_as: by keys, the family of files and the name of a tensor of the model in another library; its own name
            is an alias.
        takes_rest: whether a load returns the values of `state` under outermost keys absent from the call.
        remark: what a save of the tree leaves out, and why.
        declined: names of the arguments of `load` that are written out as False or empty.
    """

    entries: tuple[str, ...]
    tensors: dict[Keys, torch.Tensor] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    parts: dict[Keys, tuple[Box, tuple[int, ...]]] = field(default_factory=dict)
    meta: dict[Keys, tuple[torch.Tensor, Place]] = field(default_factory=dict)
    values: Json = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)
    optimizers: dict[str, OptimizerState] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    optimizer_class: str | None = None
    after_load: list[Callable[[], None]] = field(default_factory=list)
    objects: dict[Keys, Stateful] = field(default_factory=dict)
    receivers: dict[str, Receiver] = field(default_factory=dict)
    modules: dict[tuple[Keys, str], ModuleEntries] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    stored_as: dict[Keys, tuple[TensorKind, str]] = field(default_factory=dict)
    is_load: bool = False
    refers: bool = False
    takes_rest: bool = False
    remark: str = ""
    declined: Collection[str] = ()

    def replace_value(self, where: str, value: object) -> None:
        """Replace a value in its container, after `prepare_load`."""
        container, key = self.places[where]
        current = container[key]  # type: ignore[index]
        are_dicts = isinstance(value, dict) and isinstance(current, dict)
        if are_dicts and type(current) not in DICTS.values():
            current.update(value)
        elif not are_dicts or value or current:
            container[key] = with_tuples(current, value)  # type: ignore[index]

    def prepare_load(self) -> None:
        """Give memory to meta tensors, which the state dict holds from the end of the load on.

        Raises:
            CheckpointError: naming a value or a meta tensor in a tuple, which cannot be filled in place.
        """
        places = {**self.places, **{pointer(keys): place for keys, (_, place) in self.meta.items()}}
        for where, (container, _) in places.items():
            if isinstance(container, tuple):
                raise CheckpointError("A value in a tuple cannot be filled in place", where=where, fix="Pass a list.")
        tensors: dict[int, torch.Tensor] = {}
        for keys, (tensor, place) in self.meta.items():
            allocated = tensors.setdefault(id(tensor), materialized(tensor))
            add_tensor(self, keys, allocated)
            self.meta[keys] = allocated, place

    def put_tensors(self, lacking: Collection[str]) -> None:
        """Put newly allocated tensors in the places of their meta tensors.

        Args:
            lacking: stored names, which stay as they are.
        """
        unfilled = {id(self.meta[keys][0]) for keys in self.meta if stored_name(keys)[1] in lacking}
        for tensor, (container, key) in self.meta.values():
            if id(tensor) not in unfilled:
                container[key] = tensor  # type: ignore[index]


def with_tuples(template: object, value: object) -> object:
    """Return a value with tuples in place of lists where `template` has them, since old files hold tuples as lists."""
    if isinstance(value, list):
        old = template if isinstance(template, (list, tuple)) and len(template) == len(value) else [None] * len(value)
        members = [with_tuples(before, after) for before, after in zip(old, value, strict=True)]
        return tuple(members) if isinstance(template, tuple) else members
    if type(value) is dict and isinstance(template, Mapping):
        return {key: with_tuples(template.get(key), member) for key, member in value.items()}
    return value


def build_tree(
    state_dict: object, *, model: nn.Module | None = None, is_load: bool = False, refers: bool = False
) -> Tree:
    """Return a nested state dict by leaf; nothing is copied.

    Args:
        model: names the parameters of `optimizer.state_dict()`, which have numbers.
        is_load, refers: see `Tree`.

    Raises:
        CheckpointError: naming an unstorable leaf, a key above a tensor other than text, or an optimizer whose
            parameters have numbers without names.
    """
    if not isinstance(state_dict, dict):
        raise CheckpointError("A state dict is a dict", found=type(state_dict).__name__)
    tree = Tree(tuple(map(str, state_dict)), is_load=is_load, refers=refers)
    _walk_dict(tree, state_dict, (), model)
    return tree


def _walk_dict(tree: Tree, container: dict[Any, Any], keys: Keys, model: nn.Module | None) -> None:
    require_text_keys(container, keys)
    is_optimizer = is_optimizer_state(container)
    if is_optimizer:
        _take_optimizer(tree, container, keys, model)
    for key, value in container.items():
        if not is_optimizer or key not in ("state", "param_groups"):
            _walk(tree, value, (*keys, key), (container, key), model)


def require_text_keys(container: dict[Any, Any], keys: Keys) -> None:
    """Refuse a key other than text, or without a form in UTF-8.

    Raises:
        CheckpointError: naming it.
    """
    for key in container:
        if not isinstance(key, str):
            raise CheckpointError(
                "A state dict has a key that is not text",
                where=pointer(keys) or "the outermost keys",
                found=repr(key),
                fix="JSON and file names have text only: use str(key), or a list.",
            )
        if not is_unicode(key):
            raise CheckpointError("A key cannot be stored as UTF-8", where=repr(keys), found=repr(key))


def walk(tree: Tree, value: object, keys: Keys, place: Place) -> None:
    """Add a member of a state dict to a tree, by leaf.

    Args:
        place: the container of the member and its key there, for a load.

    Raises:
        CheckpointError: as `build_tree`.
    """
    _walk(tree, value, keys, place, None)


def _walk(tree: Tree, value: object, keys: Keys, place: Place, model: nn.Module | None) -> None:
    if len(keys) > _MAX_DEPTH:
        raise CheckpointError(
            "A state dict is nested too deeply",
            where=f"{pointer(keys[:4])}/...",
            expected=f"at most {_MAX_DEPTH} levels",
            fix="Look for a dict or list in itself.",
        )
    if tree.refers and _is_whole(value):
        add_whole(tree, keys, value)
    elif isinstance(value, torch.Tensor):
        add_tensor(tree, keys, value, place)
    elif is_stateful(value):
        tree.objects[keys] = value
    elif isinstance(value, dict) and (_has_text_keys(value) or _holds_tensor(value)):
        if type(value) is not dict and not _holds_tensor(value):
            tree.classes[pointer(keys)] = type(value)
        if not value:
            _add_value(tree, {}, keys, place)
        _walk_dict(tree, value, keys, model)
    elif isinstance(value, (list, tuple)) and _holds_tensor(value):
        for number, member in enumerate(value):
            _walk(tree, member, (*keys, str(number)), (value, number), model)
    else:
        _add_value(tree, encode(value, keys), keys, place)


def add_whole(tree: Tree, keys: Keys, value: object) -> None:
    """Add a nested value as a whole, with references to its tensors.

    Raises:
        CheckpointError: naming an unstorable value.
    """
    tensors: dict[Keys, torch.Tensor] = {}
    tree.values[pointer(keys)] = encode(take_out(value, keys, tensors), keys)
    for inner, tensor in tensors.items():
        add_tensor(tree, inner, tensor)


def add_object(tree: Tree, keys: Keys, state: Callable[[], Any], put: Callable[[Any], object]) -> None:
    """Add a state as a whole; in the tree of a load, its object takes it at the end.

    Args:
        state: returns it.
        put: takes it.

    Raises:
        CheckpointError: naming an unstorable value.
    """
    if tree.is_load:
        tree.receivers[pointer(keys)] = Receiver(state, put)
    else:
        add_whole(tree, keys, state())


def _is_whole(value: object) -> bool:
    """Return whether a value is a tensor, or a list with tensors, complete on every rank."""
    leaves = list(leaves_of(value)) if isinstance(value, (torch.Tensor, list, tuple)) else []
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves) and not any(
        is_stateful(leaf) or (isinstance(leaf, torch.Tensor) and is_dtensor(leaf)) for leaf in leaves
    )


def _add_value(tree: Tree, value: object, keys: Keys, place: Place) -> None:
    tree.values[pointer(keys)] = value
    tree.places[pointer(keys)] = place


def _has_text_keys(container: dict[Any, Any]) -> bool:
    return all(type(key) is str and is_unicode(key) for key in container)


def _take_optimizer(tree: Tree, state_dict: dict[str, Any], keys: Keys, model: nn.Module | None) -> None:
    names = names_of(state_dict, model, where=pointer(keys) or "the state dict")
    is_numbered = any(isinstance(key, int) for key in names)
    parameters = {} if model is None or not is_numbered else parameter_names(model)
    add_optimizer(
        tree,
        keys,
        names=names,
        groups=state_dict["param_groups"],
        state=state_dict["state"],
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
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Add an optimizer to a tree under `keys`; see `OptimizerState`. State that is no tensor is a single value.

    Args:
        groups: its parameter groups, whose `params` are keys of `names`.
        defaults: of the values in a group.

    Raises:
        CheckpointError: naming an unstorable value.
    """
    parameter_groups = []
    for number, group in enumerate(groups):
        numbers = {}
        require_text_keys(group, (*keys, "param_groups", str(number)))
        for key, value in group.items():
            inner = (*keys, "param_groups", str(number), key)
            if isinstance(value, torch.Tensor):
                add_tensor(tree, inner, value, (group, key))
            elif key not in ("params", "param_names"):
                numbers[key] = encode_number(value, inner)
        usual = frozenset(key for key in numbers if key in defaults and _is_same(group[key], defaults[key]))
        parameter_groups.append(
            ParameterGroup([names[parameter] for parameter in group["params"]], numbers, group, usual)
        )
    for parameter, values in state.items():
        at = (*keys, "state", names[parameter])
        require_text_keys(values, at)
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                add_tensor(tree, (*at, key), value, (values, key))
            else:
                add_object(tree, (*at, key), partial(values.get, key), partial(values.__setitem__, key))
    tree.optimizers[pointer(keys)] = OptimizerState(
        {name: parameter for parameter, name in names.items()}, parameter_groups, state, parameters
    )


def _is_same(value: object, default: object) -> bool:
    return (
        type(value) is type(default)
        and isinstance(value, (bool, int, float, str, tuple, type(None)))
        and (value == default)
    )


def add_tensor(tree: Tree, keys: Keys, tensor: torch.Tensor, place: Place | None = None) -> None:
    """Add a tensor to a tree, in the form of the files.

    Args:
        place: the container of the tensor and its key there, if a load may replace it.

    Raises:
        CheckpointError: naming it, if its class keeps its memory elsewhere.
    """
    resolved = resolve(tensor, partial(pointer, keys))
    if resolved is None:
        return
    tree.tensors[keys] = resolved.tensor
    if resolved.dtype is not None:
        tree.dtypes[stored_name(keys)[1]] = resolved.dtype
    if resolved.box is not None:
        tree.parts[keys] = resolved.box, resolved.shape
    if resolved.copy_back is not None:
        tree.after_load.append(resolved.copy_back)
    if place is not None and resolved.tensor.is_meta:
        tree.meta[keys] = tensor, place


def _holds_tensor(value: object) -> bool:
    try:
        return any(isinstance(leaf, torch.Tensor) or is_stateful(leaf) for leaf in leaves_of(value))
    except RecursionError:
        return False  # it holds itself, which `encode` refuses
