"""The values of a state dict beside its tensors, and their form in `trainer_state.json`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from reprise.errors import CheckpointError
from reprise.format.layout import TensorKind
from reprise.format.names import FORMAT, STATE
from reprise.loading.reader import Checkpoint, read_places
from reprise.nested.stored_names import Keys, keys_of, keys_of_pointer, pointer
from reprise.nested.typed_values import DICTS, ByLeaf, TensorReference, decode, decode_number, references
from reprise.storage import json_file
from reprise.storage.json_file import Json

STATE_DICT = "state_dict"
_MOST_SHOWN = 200  # characters of a value in a message
_OPTIMIZER = "/optimizer"  # its groups have the place where `save` writes those of its optimizer
_FURTHER = ("classes", "dtypes", "orders")


@dataclass(frozen=True, slots=True)
class NestedValues:
    """The values of a state dict by JSON Pointer, and the parameter groups of each optimizer in it, as JSON.

    Args:
        groups: by the optimizer's JSON Pointer: the `names` and the `numbers` of each group, and the `place` of a group
            in the list of its rank, where it has another place here.
        optimizer: the class of `/optimizer`; None if only its state dict is known.
        classes: by JSON Pointer, a key of `DICTS` for each dict of a subclass.
        dtypes: by stored name, the dtype of each tensor with another dtype in the files.
        orders: by stored name, the dimensions of each tensor of an optimizer from the outermost in memory, where they
            are in another order than in the files: products of matrices have other bits then.
    """

    values: Json = field(default_factory=dict)
    groups: Mapping[str, list[Json]] = field(default_factory=dict)
    optimizer: str | None = None
    classes: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, list[int]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the message to another rank."""
        return json_file.to_bytes({name: getattr(self, name) for name in self.__slots__})

    @staticmethod
    def from_bytes(data: bytes) -> NestedValues:
        """Return the values in a message."""
        return NestedValues(**json_file.parse(data, where="a message"))

    def document(self, iteration: int) -> Json:
        """Return the state file of a checkpoint."""
        groups = dict(self.groups)
        document: Json = {"format": FORMAT, "iteration": iteration, "groups": groups.pop(_OPTIMIZER, [])}
        if self.optimizer is not None:
            document["optimizer"] = {"name": self.optimizer}
        optional = {name: dict(getattr(self, name)) for name in _FURTHER if getattr(self, name)}
        return {**document, STATE_DICT: {"values": self.values, "groups": groups, **optional}}


def join_values(by_rank: Mapping[int, NestedValues]) -> NestedValues:
    """Return the values of all ranks. Stages of a pipeline have groups of their own.

    Args:
        by_rank: the different values, each of the first rank with them.

    Raises:
        CheckpointError: naming a value or a parameter group with a difference between ranks.
    """
    first: dict[tuple[str, str], tuple[int, Any]] = {}
    groups: dict[str, list[Json]] = {}

    def join(member: str, where: str, rank: int, value: object) -> None:
        first_rank, first_value = first.setdefault((member, where), (rank, value))
        if first_value is not value and member != "orders" and _text(first_value) != _text(value):
            raise CheckpointError(  # memory of another order holds the same values
                "The ranks give different values",
                where=where,
                expected="the same on every rank, as one file holds it",
                found=f"{_shown(first_value)} on rank {first_rank} and {_shown(value)} on rank {rank}",
                fix="Nothing was saved. Give what differs by rank in `per_rank`, in a state dict under a key for each "
                "rank, or gather it first.",
            )

    for rank, values in sorted(by_rank.items()):
        join("optimizer", _OPTIMIZER, rank, values.optimizer)
        for member in (*_FURTHER, "values"):
            for where, value in getattr(values, member).items():
                join(member, where, rank, value)
        for where, groups_of_rank in values.groups.items():
            joined_groups = groups.setdefault(where, [])
            texts = {_text({**group, "place": None}) for group in joined_groups}
            for place, group in enumerate(groups_of_rank):
                for name in group["names"]:
                    join("groups", f"{where}/param_groups, {name}", rank, group["numbers"])
                if _text({**group, "place": None}) not in texts:
                    joined_groups.append(group if place == len(joined_groups) else {**group, "place": place})
    joined: dict[str, Json] = {member: {} for member in ("values", *_FURTHER)}
    for (member, where), (_, value) in first.items():
        joined.get(member, {})[where] = value
    return NestedValues(groups=groups, optimizer=by_rank[min(by_rank)].optimizer, **joined)


@dataclass(frozen=True, slots=True)
class StoredState:
    """The state of a checkpoint as a nested dict, with a reference in place of each tensor.

    Args:
        root: the state; its dicts by leaf are of class `ByLeaf`.
        values: by JSON Pointer, what the checkpoint holds as a single value.
        groups, dtypes, orders: see `NestedValues`.
    """

    root: ByLeaf = field(default_factory=ByLeaf)
    values: Json = field(default_factory=dict)
    groups: Mapping[str, list[Json]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, list[int]] = field(default_factory=dict)

    def at(self, keys: Keys, default: object = None) -> Any:
        """Return the value under keys, which may lead through a list."""
        value: Any = self.root
        for key in keys:
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, (list, tuple)) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                return default
        return value

    def members(self, *keys: str) -> Iterator[tuple[str, Any]]:
        """Yield the members of the dict under keys, if there is one."""
        value = self.at(keys)
        return iter(tuple(value.items()) if isinstance(value, dict) else ())


def read_state(checkpoint: Checkpoint) -> StoredState:
    """Return the state of a checkpoint of any version, with its tensors.

    Raises:
        CheckpointError: if a file of it is malformed.
    """
    state = read_values(checkpoint)
    names = {reference.name for reference in references(state.root)}
    kinds = dict.fromkeys(checkpoint.manifest.aliases, TensorKind.OPTIMIZER)
    kinds |= {name: place.spec.kind for name, place in read_places(checkpoint).items()}
    for name, kind in kinds.items():
        with contextlib.suppress(ValueError):  # a value has the place: tensors have any names
            if name not in names:
                _insert(state.root, keys_of(kind, name), TensorReference(name, is_implied=True))
    return state


def read_values(checkpoint: Checkpoint) -> StoredState:
    """Return the state of a checkpoint of any version, without the tensors that no value refers to.

    Raises:
        CheckpointError: if its state file is malformed.
    """
    section = upgraded(checkpoint.state)
    for member, is_valid in _CHECKS.items():
        contents = section.get(member)
        if not isinstance(contents, dict):
            raise _malformed(checkpoint, STATE_DICT, checkpoint.state.get(STATE_DICT))
        for where, content in contents.items():
            if not is_valid(content):
                raise _malformed(checkpoint, f"{member} of {where}", content)
    root, values = ByLeaf(), {where: decode(value) for where, value in section["values"].items()}
    try:
        for where, value in values.items():
            _insert(root, _keys_at(where), value)
        for where in section["groups"]:
            _dict_at(root, _keys_at(where))
        for where in sorted(section["classes"], reverse=True):  # a dict after those in it
            *parents, last = _keys_at(where)
            container = _dict_at(root, parents)
            container[last] = DICTS[section["classes"][where]](container.get(last, ()))
    except (TypeError, ValueError) as error:
        raise _malformed(checkpoint, STATE_DICT, checkpoint.state.get(STATE_DICT)) from error
    groups = {where: members for where, members in section["groups"].items() if members}
    return StoredState(root, values, groups, section["dtypes"], section["orders"])


def upgraded(state: Json) -> Json:
    """Return the members of `NestedValues` in a state file of any version.

    Version 0.1 stored the `state` of a save as a nested dict.
    """
    user = state.get("user", {})
    section = state.get(STATE_DICT, {"values": _by_pointer(user), "groups": {}}) if isinstance(user, dict) else None
    groups = section.get("groups") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(groups, dict):
        return {}
    return {**{member: {} for member in _FURTHER}, **section, "groups": {**groups, _OPTIMIZER: state.get("groups", [])}}


def _by_pointer(nested: Json, keys: Keys = ()) -> Json:
    """Return a nested dict of JSON by pointer; an empty dict in it is a value."""
    by_pointer: Json = {}
    for key, member in nested.items():
        inner = (*keys, key)
        by_pointer |= _by_pointer(member, inner) if isinstance(member, dict) and member else {pointer(inner): member}
    return by_pointer


def _keys_at(where: str) -> Keys:
    keys = keys_of_pointer(where)
    if pointer(keys) != where:
        raise ValueError(f"{where!r} is no JSON Pointer")
    return keys


def _dict_at(container: ByLeaf, keys: Iterable[str]) -> ByLeaf:
    """Return the dict by leaf under keys, made where it is not there.

    Raises:
        ValueError: if a value is in the way.
    """
    for key in keys:
        container = container.setdefault(key, ByLeaf())
        if type(container) is not ByLeaf:
            raise ValueError(f"{key!r} is a value")
    return container


def _insert(root: ByLeaf, keys: Keys, value: object) -> None:
    *parents, last = keys
    container = _dict_at(root, parents)
    if last in container:
        raise ValueError(f"{last!r} is there twice")
    container[last] = value


def _is_group(group: object) -> bool:
    if not isinstance(group, dict):
        return False
    names, numbers = group.get("names"), group.get("numbers")
    is_named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_named or not isinstance(numbers, dict) or not {"params", "param_names"}.isdisjoint(numbers):
        return False
    return all(_is_readable(value, decode_number) for value in numbers.values())


def _is_readable(value: object, read: Callable[[object], object] = decode) -> bool:
    try:
        read(value)
    except ValueError:
        return False
    return True


# What is valid under each member of `NestedValues` in a state file.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "values": _is_readable,
    "groups": lambda groups: isinstance(groups, list) and all(map(_is_group, groups)),
    "classes": lambda name: isinstance(name, str) and name in DICTS,
    "dtypes": lambda name: isinstance(getattr(torch, str(name), None), torch.dtype),
    "orders": lambda order: isinstance(order, list) and {*map(str, order)} == {*map(str, range(len(order)))},
}


def _malformed(checkpoint: Checkpoint, member: str, content: object) -> CheckpointError:
    where = f"{checkpoint.path / STATE}, {member}"
    return CheckpointError("A state file is malformed", where=where, expected="what `save` writes", found=repr(content))


def _shown(value: object) -> str:
    text = _text(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ... ({len(text)} characters)"


def _text(value: object) -> str:
    """Return a value as text, in which the order of keys has no part."""
    return json.dumps(value, sort_keys=True)
