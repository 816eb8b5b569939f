"""A state dict's values beside its tensors, and their form in `trainer_state.json`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reprise.errors import CheckpointError
from reprise.format.layout import TensorKind
from reprise.format.names import FORMAT, STATE
from reprise.loading.reader import Checkpoint, read_places
from reprise.nested.stored_names import Keys, keys_of, keys_of_pointer, pointer
from reprise.nested.table import Differences, refuse
from reprise.nested.typed_values import DICTS, MALFORMED, ByLeaf, TensorReference, decode, references, torch_dtype
from reprise.storage.json_file import Json

STATE_DICT = "state_dict"
_MOST_SHOWN = 200  # largest number of a value's characters in a message
_OPTIMIZER = "/optimizer"  # the state file stores its groups separately, as `save` does
_FURTHER = ("dtypes", "orders")

# A state dict's content beside its tensors, as JSON:
#   values      by JSON Pointer
#   groups      by an optimizer's JSON Pointer, each parameter group's `names` and `numbers`, and its `place` in its
#               rank's list if it differs from the place here
#   optimizer   the classes of optimizer objects by JSON Pointer. The file has that of `/optimizer`
#   dtypes      by stored name, a tensor's dtype in memory if it differs from the dtype in the files
#   orders      by stored name, an optimizer tensor's dimensions from the outermost in memory, if their order differs
#               from the order in the files, since matrix products then have other bits
Section = dict[str, Json]


def document(section: Section, iteration: int) -> Json:
    """Return a checkpoint's state file as JSON."""
    groups, name = dict(section["groups"]), section["optimizer"].get(_OPTIMIZER)
    optional = {member: section[member] for member in _FURTHER if section[member]}
    return {
        "format": FORMAT,
        "iteration": iteration,
        "groups": groups.pop(_OPTIMIZER, []),
        **({} if name is None else {"optimizer": {"name": name}}),
        STATE_DICT: {"values": section["values"], "groups": groups, **optional},
    }


def join_sections(by_rank: Mapping[int, Section]) -> Section:
    """Return the section for all ranks. Pipeline stages have their own parameter groups.

    Args:
        by_rank: The distinct sections, each under the first rank with it.

    Raises:
        CheckpointError: A value or a parameter group differs between ranks.
    """
    joined: Section = {}
    by_member = dict[str, Differences]()  # a value and, for instance, its dtype have the same pointer
    for rank, section in sorted(by_rank.items()):
        for member, contents in section.items():
            into = joined.setdefault(member, {})
            differences = by_member.setdefault(member, Differences(lambda text: f"{text:.{_MOST_SHOWN}}"))
            for where, value in contents.items():
                if member != "groups":
                    into.setdefault(where, value)
                    if member != "orders":  # ranks may have other memory layouts
                        differences.add(where, rank, _text(value))
                    continue
                groups = into.setdefault(where, [])
                texts = {_text({**group, "place": None}) for group in groups}
                for place, group in enumerate(value):
                    for name in group["names"]:
                        differences.add(f"{where}/param_groups, {name}", rank, _text(group["numbers"]))
                    if _text({**group, "place": None}) not in texts:
                        groups.append(group if place == len(groups) else {**group, "place": place})
    refuse(
        [problem for differences in by_member.values() for problem in differences.problems],
        "The ranks pass different values",
        "Pass values that differ by rank in `per_rank` or, in a state dict, under a key for each rank, or gather them "
        "first.",
    )
    return joined


@dataclass(frozen=True, slots=True)
class StoredState:
    """A checkpoint's state as a nested dict, with references in place of tensors.

    Args:
        root: The state. Its dicts stored by leaf have the class `ByLeaf`.
        groups: See `Section`, also for `dtypes` and `orders`.
    """

    root: ByLeaf
    groups: Mapping[str, list[Json]]
    dtypes: Mapping[str, str]
    orders: Mapping[str, list[int]]

    def members(self, *keys: str) -> dict[str, Any]:
        """Return the dict under keys. Empty if there is no dict."""
        value: Any = self.root
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, dict) else {}


def read_state(checkpoint: Checkpoint) -> StoredState:
    """Return a checkpoint's state with its tensors. Reads any version.

    Raises:
        CheckpointError: A state file or tensor header is malformed.
    """
    try:
        state = _parsed(_upgraded(checkpoint.state))
    except MALFORMED as error:
        raise CheckpointError(
            "A state file is malformed",
            where=f"{checkpoint.path / STATE}, {STATE_DICT}",
            expected="what `save` writes",
            found=f"{type(error).__name__}: {error}",
        ) from error
    names = {reference.name for reference in references(state.root)}
    kinds = dict.fromkeys(checkpoint.manifest.aliases, TensorKind.OPTIMIZER)
    kinds |= {name: place.spec.kind for name, place in read_places(checkpoint).items()}
    for name, kind in kinds.items():
        with contextlib.suppress(ValueError):  # a value is already there: tensors may have any name
            if name not in names:
                _insert(state.root, keys_of(kind, name), TensorReference(name, is_implied=True))
    return state


def _upgraded(state: Json) -> Section:
    """Return the section in a state file. Reads any version.

    Version 0.1 stored the saved `state` as a nested dict. Version 0.2 stored a dict subclass by leaf, with its class.
    """
    user = {pointer((key,)): value for key, value in state.get("user", {}).items()}
    section = state.get(STATE_DICT, {"values": user, "groups": {}})
    groups = {**section["groups"], _OPTIMIZER: state.get("groups", [])}
    return {**{member: {} for member in ("classes", *_FURTHER)}, **section, "groups": groups}


def _parsed(section: Section) -> StoredState:
    root = ByLeaf()
    for where, value in section["values"].items():
        _insert(root, keys_of_pointer(where), decode(value))
    for groups in section["groups"].values():
        for group in groups:
            is_group = isinstance(group["numbers"], dict) and all(isinstance(name, str) for name in group["names"])
            _require(is_group, group)
    for where in sorted(section["classes"], reverse=True):  # inner dicts before outer dicts
        *parents, last = keys_of_pointer(where)
        container = _dict_at(root, parents)
        container[last] = DICTS[section["classes"][where]](container.get(last, ()))
    for name in section["dtypes"].values():
        torch_dtype(name)
    for order in section["orders"].values():
        _require(sorted(order) == [*range(len(order))], order)
    groups = {where: members for where, members in section["groups"].items() if members}
    return StoredState(root, groups, section["dtypes"], section["orders"])


def _require(is_valid: bool, content: object) -> None:
    if not is_valid:
        raise ValueError(f"{content!r}")


def _dict_at(container: ByLeaf, keys: Iterable[str]) -> ByLeaf:
    """Return the dict by leaf under keys, creating it if necessary.

    Raises:
        ValueError: A value is in the way.
    """
    for key in keys:
        container = container.setdefault(key, ByLeaf())
        _require(type(container) is ByLeaf, key)
    return container


def _insert(root: ByLeaf, keys: Keys, value: object) -> None:
    *parents, last = keys
    container = _dict_at(root, parents)
    _require(last not in container, last)
    container[last] = value


def _text(value: object) -> str:
    """Return a value as text, independent of key order."""
    return json.dumps(value, sort_keys=True)
