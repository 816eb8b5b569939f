"""The values of a state dict beside its tensors, and their form in `trainer_state.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reprise import json_file
from reprise.errors import CheckpointError
from reprise.format.names import FORMAT, STATE
from reprise.json_file import Json
from reprise.loading.reader import Checkpoint
from reprise.nested.stateful import references
from reprise.nested.stored_names import Keys, keys_of_pointer, pointer, stored_name
from reprise.nested.tree import Tree
from reprise.nested.typed_values import DICTS, decode, decode_number, encode
from reprise.tensors.live import order_in_memory

STATE_DICT = "state_dict"
_MOST_SHOWN = 200  # characters of a value in a message
_CLASS_NAMES = {kind: name for name, kind in DICTS.items()}
_OPTIMIZER = "/optimizer"  # its groups have the place where `save` writes those of its optimizer


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

    @property
    def further(self) -> dict[str, Json]:
        """Return what describes values and tensors."""
        return {"classes": dict(self.classes), "dtypes": dict(self.dtypes), "orders": dict(self.orders)}

    def to_bytes(self) -> bytes:
        """Return the message to another rank."""
        members = {"values": self.values, "groups": dict(self.groups), "optimizer": self.optimizer}
        return json_file.to_bytes({**members, **self.further})

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
        optional = {key: members for key, members in self.further.items() if members}
        return {**document, STATE_DICT: {"values": self.values, "groups": groups, **optional}}

    def value(self, where: str) -> Any:
        """Return the value at a JSON Pointer; an empty dict has its class."""
        return DICTS[self.classes[where]]() if where in self.classes else decode(self.values[where])

    def has(self, where: str) -> bool:
        """Return whether there is a value at a JSON Pointer, or below it."""
        return where in self.values or any(inner.startswith(f"{where}/") for inner in self.values)

    def below(self, where: str) -> Any:
        """Return the value at a JSON Pointer, or the dict of values below it; None if there is neither.

        Earlier versions stored the state of an object by leaf, as of any dict.
        """
        if where in self.values:
            return self.value(where)
        below = {at: value for at, value in self.values.items() if at.startswith(f"{where}/")}
        inner: Any = replace(self, values=below).nested() if below else None
        for key in keys_of_pointer(where) if below else ():
            inner = inner[key]
        return inner

    def nested(self, *, without: Collection[str] = ()) -> Json:
        """Return the values as a nested dict, without those below some of the outermost keys."""
        tree: Json = {}
        for where in self.values:
            *parents, last = keys = keys_of_pointer(where)
            if keys[0] not in without:
                inner = tree
                for depth, key in enumerate(parents, 1):
                    kind = DICTS[self.classes.get(pointer(keys[:depth]), "dict")]
                    inner = inner.setdefault(key, kind())
                inner[last] = self.value(where)
        return tree


def by_leaf(values: NestedValues, pointers: Collection[str]) -> NestedValues:
    """Return the values by the pointers of a load.

    A value with tensors, or with requested members, is divided: a template finds a tensor in a list by its name, and a
    number beside it as a value of its own.
    """
    parents = {pointer(keys[:count]) for keys in map(keys_of_pointer, pointers) for count in range(1, len(keys))}
    by_pointer: Json = {}
    for where, value in values.values.items():
        decoded = None if where in pointers else decode(value)
        if any(references(decoded)) or (where in parents and isinstance(decoded, (dict, list, tuple))):
            leaves = _leaves(decoded, keys_of_pointer(where), pointers)
            by_pointer |= {at: encode(leaf, keys_of_pointer(at)) for at, leaf in leaves}
        else:
            by_pointer[where] = value
    return replace(values, values=by_pointer)


def _leaves(value: object, keys: Keys, pointers: Collection[str]) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value and pointer(keys) not in pointers:
        for key, member in value.items():
            yield from _leaves(member, (*keys, str(key)), pointers)
    elif isinstance(value, (list, tuple)) and any(references(value)):
        for number, member in enumerate(value):
            yield from _leaves(member, (*keys, str(number)), pointers)
    elif not any(references(value)):
        yield pointer(keys), value


def values_of(tree: Tree) -> NestedValues:
    """Return the values of a state dict."""
    groups = {
        where: [{"names": group.names, "numbers": group.numbers} for group in optimizer.groups]
        for where, optimizer in tree.optimizers.items()
    }
    classes = {where: _CLASS_NAMES[kind] for where, kind in tree.classes.items() if kind in _CLASS_NAMES}
    tops = {(*keys_of_pointer(where), "state") for where in tree.optimizers}
    of_optimizers = {keys: t for keys, t in tree.tensors.items() if any(keys[: len(top)] == top for top in tops)}
    orders = {
        stored_name(keys)[1]: order for keys, tensor in of_optimizers.items() if (order := order_in_memory(tensor))
    }
    return NestedValues(tree.values, groups, tree.optimizer_class, classes, tree.dtypes, orders)


def join_values(by_rank: Mapping[int, NestedValues]) -> NestedValues:
    """Return the values of all ranks. Stages of a pipeline have groups of their own.

    Args:
        by_rank: the different values, each of the first rank with them.

    Raises:
        CheckpointError: naming a value or a parameter group with a difference between ranks.
    """
    values: dict[str, tuple[int, Any]] = {}
    groups: dict[str, list[Json]] = {}
    of_parameter: dict[tuple[str, str], tuple[int, Json]] = {}
    further: dict[str, dict[str, tuple[int, Any]]] = {"classes": {}, "dtypes": {}, "orders": {}}
    first_rank = min(by_rank)
    optimizer = by_rank[first_rank].optimizer
    for rank, values_of_rank in sorted(by_rank.items()):
        if values_of_rank.optimizer != optimizer:
            raise _differs(_OPTIMIZER, (first_rank, optimizer), (rank, values_of_rank.optimizer))
        for member, joined in further.items():
            for where, name in getattr(values_of_rank, member).items():
                first, first_value = joined.setdefault(where, (rank, name))
                if first_value != name and member != "orders":  # memory of another order holds the same values
                    raise _differs(where, (first, first_value), (rank, name))
        for where, value in values_of_rank.values.items():
            first, first_value = values.setdefault(where, (rank, value))
            if _text(first_value) != _text(value):
                raise _differs(where, (first, first_value), (rank, value))
        for where, groups_of_rank in values_of_rank.groups.items():
            known_groups = groups.setdefault(where, [])
            texts = {_text(group | {"place": None}) for group in known_groups}
            for place, group in enumerate(groups_of_rank):
                for name in group["names"]:
                    first, numbers = of_parameter.setdefault((where, name), (rank, group["numbers"]))
                    if _text(numbers) != _text(group["numbers"]):
                        raise _differs(f"{where}/param_groups, {name}", (first, numbers), (rank, group["numbers"]))
                if _text(group | {"place": None}) not in texts:
                    known_groups.append(group if place == len(known_groups) else {**group, "place": place})
    return NestedValues(_without_ranks(values), groups, optimizer, *map(_without_ranks, further.values()))


def _without_ranks(joined: Mapping[str, tuple[int, Any]]) -> Json:
    return {where: value for where, (_, value) in joined.items()}


def read_values(checkpoint: Checkpoint) -> NestedValues:
    """Return the values in a checkpoint: of a state dict, or the `state` and the parameter groups stored by `save`.

    Raises:
        CheckpointError: if its state file is malformed.
    """
    state = checkpoint.state
    user = state.get("user", {})
    if not isinstance(user, dict):
        raise _malformed(checkpoint, "user", user)
    nested = state.get(STATE_DICT, {"values": _pointers(user), "groups": {}})
    members = nested if isinstance(nested, dict) else {}
    values, groups = members.get("values"), members.get("groups")
    classes, dtypes, orders = (members.get(key, {}) for key in ("classes", "dtypes", "orders"))
    if (
        not isinstance(values, dict)
        or not isinstance(groups, dict)
        or not isinstance(classes, dict)
        or not isinstance(dtypes, dict)
        or not isinstance(orders, dict)
        or not _is_tree([*values, *groups], values)
        or "" in values
        or not all(isinstance(name, str) and name in DICTS for name in classes.values())
        or not all(isinstance(getattr(torch, str(name), None), torch.dtype) for name in dtypes.values())
        or not all(
            isinstance(order, list) and {*map(str, order)} == {*map(str, range(len(order)))}
            for order in orders.values()
        )
    ):
        raise _malformed(checkpoint, STATE_DICT, nested)
    groups = {**groups, _OPTIMIZER: state.get("groups", [])}
    for where, members_of_optimizer in groups.items():
        for group in members_of_optimizer if isinstance(members_of_optimizer, list) else [members_of_optimizer]:
            if not _is_group(group):
                raise _malformed(checkpoint, f"groups of {where}", group)
    for where, value in values.items():
        if not _is_readable(value, decode):
            raise _malformed(checkpoint, f"{STATE_DICT}.values of {where}", value)
    return NestedValues(
        values,
        {where: members_of_optimizer for where, members_of_optimizer in groups.items() if members_of_optimizer},
        None,
        classes,
        dtypes,
        orders,
    )


def _is_tree(pointers: Sequence[str], values: Json) -> bool:
    """Return whether these are JSON Pointers, and none leads through a value."""
    for where in pointers:
        keys = keys_of_pointer(where)
        if pointer(keys) != where or any(pointer(keys[:count]) in values for count in range(1, len(keys))):
            return False
    return True


def _is_group(group: object) -> bool:
    if not isinstance(group, dict):
        return False
    names, numbers = group.get("names"), group.get("numbers")
    is_named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_named or not isinstance(numbers, dict) or not {"params", "param_names"}.isdisjoint(numbers):
        return False
    return all(_is_readable(value, decode_number) for value in numbers.values())


def _is_readable(value: object, read: Callable[[object], object]) -> bool:
    try:
        read(value)
    except ValueError:
        return False
    return True


def _pointers(nested: Json, keys: Keys = ()) -> Json:
    """Return a nested dict of JSON by pointer; an empty dict in it is a value."""
    by_pointer: Json = {}
    for key, member in nested.items():
        if isinstance(member, dict) and member:
            by_pointer |= _pointers(member, (*keys, key))
        else:
            by_pointer[pointer((*keys, key))] = member
    return by_pointer


def _differs(where: str, first: tuple[int, object], second: tuple[int, object]) -> CheckpointError:
    return CheckpointError(
        "The ranks give different values",
        where=where,
        expected="the same on every rank, as one file holds it",
        found=f"{_shown(first[1])} on rank {first[0]} and {_shown(second[1])} on rank {second[0]}",
        fix="Nothing was saved. Give what differs by rank in `per_rank`, in a state dict under a key for each rank, or "
        "gather it first.",
    )


def _malformed(checkpoint: Checkpoint, member: str, content: object) -> CheckpointError:
    where = f"{checkpoint.path / STATE}, {member}"
    return CheckpointError("A state file is malformed", where=where, expected="what `save` writes", found=repr(content))


def _shown(value: object) -> str:
    text = _text(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ... ({len(text)} characters)"


def _text(value: object) -> str:
    """Return a value as text, in which the order of keys has no part."""
    return json.dumps(value, sort_keys=True)
