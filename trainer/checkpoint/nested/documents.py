"""The values of a state dict that are no tensors, and their form in `trainer_state.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoint.format import json_file
from trainer.checkpoint.format.json_file import Json
from trainer.checkpoint.format.names import FORMAT, STATE
from trainer.checkpoint.loading.reader import Checkpoint
from trainer.checkpoint.nested.stored_names import Keys, keys_of_pointer, pointer
from trainer.checkpoint.nested.tree import Tree
from trainer.checkpoint.optimizer_state import is_plain_number
from trainer.errors import CheckpointError

STATE_DICT = "state_dict"
_OPTIMIZER = "/optimizer"  # its groups have the place where `save` writes those of its optimizer


@dataclass(frozen=True, slots=True)
class NestedValues:
    """The values of a state dict by JSON Pointer, and the parameter groups of each optimizer in it.

    Args:
        groups: by the optimizer's JSON Pointer: the `names` and the `numbers` of each group.
        optimizer: the class of `/optimizer`; None if only its state dict is known.
    """

    values: Json = field(default_factory=dict)
    groups: Mapping[str, list[Json]] = field(default_factory=dict)
    optimizer: str | None = None

    def to_bytes(self) -> bytes:
        """Return the message to another rank."""
        return json_file.to_bytes({"values": self.values, "groups": dict(self.groups), "optimizer": self.optimizer})

    @staticmethod
    def from_bytes(data: bytes) -> NestedValues:
        """Return the values in a message."""
        found = json_file.parse(data, where="a message")
        return NestedValues(found["values"], found["groups"], found["optimizer"])

    def document(self, iteration: int) -> Json:
        """Return the state file of a checkpoint."""
        groups = dict(self.groups)
        document: Json = {"format": FORMAT, "iteration": iteration, "groups": groups.pop(_OPTIMIZER, [])}
        if self.optimizer is not None:
            document["optimizer"] = {"name": self.optimizer}
        return {**document, STATE_DICT: {"values": self.values, "groups": groups}}

    def nested(self, *, without: Sequence[str] = ()) -> Json:
        """Return the values as a nested dict, without those below some of the outermost keys."""
        found: Json = {}
        for where, value in self.values.items():
            *parents, last = keys_of_pointer(where)
            if [*parents, last][0] not in without:
                inner = found
                for key in parents:
                    inner = inner.setdefault(key, {})
                inner[last] = value
        return found


def values_of(tree: Tree) -> NestedValues:
    """Return the values of a state dict."""
    groups = {
        where: [{"names": group.names, "numbers": group.numbers} for group in found.groups]
        for where, found in tree.optimizers.items()
    }
    return NestedValues(tree.values, groups, tree.optimizer_class)


def join_values(by_rank: Mapping[int, NestedValues]) -> NestedValues:
    """Return the values of all ranks, given those that differ by rank. Stages of a pipeline have groups of their own.

    Raises:
        CheckpointError: naming a value or a parameter group that is another one on another rank.
    """
    values: dict[str, tuple[int, Any]] = {}
    groups: dict[str, list[Json]] = {}
    of_parameter: dict[tuple[str, str], tuple[int, Json]] = {}
    classes = {rank: given.optimizer for rank, given in sorted(by_rank.items())}
    first_rank = min(by_rank)
    for rank, given in sorted(by_rank.items()):
        if given.optimizer != classes[first_rank]:
            raise _differs(_OPTIMIZER, (first_rank, classes[first_rank]), (rank, given.optimizer))
        for where, value in given.values.items():
            first, known = values.setdefault(where, (rank, value))
            if _text(known) != _text(value):
                raise _differs(where, (first, known), (rank, value))
        for where, found in given.groups.items():
            known_groups = groups.setdefault(where, [])
            for group in found:
                for name in group["names"]:
                    first, numbers = of_parameter.setdefault((where, name), (rank, group["numbers"]))
                    if _text(numbers) != _text(group["numbers"]):
                        raise _differs(f"{where}/param_groups, {name}", (first, numbers), (rank, group["numbers"]))
                if _text(group) not in map(_text, known_groups):
                    known_groups.append(group)
    return NestedValues({where: value for where, (_, value) in values.items()}, groups, classes[first_rank])


def read_values(checkpoint: Checkpoint) -> NestedValues:
    """Return the values in a checkpoint: of a state dict, or the `state` and the parameter groups that `save` stored.

    Raises:
        CheckpointError: if its state file is malformed.
    """
    state = checkpoint.state
    user = state.get("user", {})
    if not isinstance(user, dict):
        raise _malformed(checkpoint, "user", user)
    nested = state.get(STATE_DICT, {"values": _pointers(user), "groups": {}})
    values, groups = (nested.get(key) for key in ("values", "groups")) if isinstance(nested, dict) else (None, None)
    if (
        not isinstance(values, dict)
        or not isinstance(groups, dict)
        or not _is_tree([*values, *groups], values)
        or "" in values
    ):
        raise _malformed(checkpoint, STATE_DICT, nested)
    groups = {**groups, _OPTIMIZER: state.get("groups", [])}
    for where, found in groups.items():
        for group in found if isinstance(found, list) else [found]:
            if not _is_group(group):
                raise _malformed(checkpoint, f"groups of {where}", group)
    return NestedValues(values, {where: found for where, found in groups.items() if found})


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
    return is_named and isinstance(numbers, dict) and all(map(is_plain_number, numbers.values()))


def _pointers(nested: Json, keys: Keys = ()) -> Json:
    """Return a nested dict of JSON by pointer; an empty dict in it is a value."""
    found: Json = {}
    for key, member in nested.items():
        if isinstance(member, dict) and member:
            found |= _pointers(member, (*keys, key))
        else:
            found[pointer((*keys, key))] = member
    return found


def _differs(where: str, first: tuple[int, object], second: tuple[int, object]) -> CheckpointError:
    return CheckpointError(
        "The ranks give different values",
        where=where,
        expected="the same on every rank, as one file holds it",
        found=f"{_text(first[1])} on rank {first[0]} and {_text(second[1])} on rank {second[0]}",
        fix="Nothing was saved. Give what differs by rank under a key for each rank, or gather it first.",
    )


def _malformed(checkpoint: Checkpoint, member: str, found: object) -> CheckpointError:
    where = f"{checkpoint.path / STATE}, {member}"
    return CheckpointError("A state file is malformed", where=where, expected="what `save` writes", found=repr(found))


def _text(value: object) -> str:
    """Return a value as JSON, in which tuples are lists and the order of keys has no part."""
    return json.dumps(value, sort_keys=True)
