"""Stored names for a nested state dict's leaves. A name depends only on the leaf's keys, and names are unique.

The weight `state["model"][NAME]` keeps its name. `state["optimizer"]["state"][NAME][KEY]` is stored as `KEY.NAME`, like
any optimizer's. Every other leaf is stored under its JSON Pointer (RFC 6901), which starts with a slash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from reprise.format.layout import TensorKind, TensorSpec

Keys = tuple[str, ...]  # outermost first; a list index is a decimal number

MODEL = "model"
OPTIMIZER = ("optimizer", "state")
PER_RANK = "per_rank"  # each rank's own values are below it, by rank
RNG = "rng"  # the random state's key below the rank
_DIGITS = re.compile("([0-9]+)")


def pointer(keys: Sequence[str]) -> str:
    """Return the JSON Pointer to a leaf. Empty for the state dict itself."""
    return "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in keys)


def keys_of_pointer(text: str) -> Keys:
    """Return the keys in a JSON Pointer."""
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])


def stored_name(keys: Keys) -> tuple[TensorKind, str]:
    """Return a tensor's file family and stored name."""
    match keys:
        case (top, name) if top == MODEL and _is_plain(name):
            return TensorKind.MODEL, name
        case (*top, name, key) if tuple(top) == OPTIMIZER and name and _is_plain(key) and "." not in key:
            return TensorKind.OPTIMIZER, f"{key}.{name}"
    return TensorKind.EXTRA, pointer(keys)


def keys_of(kind: TensorKind, name: str) -> Keys:
    """Return a stored tensor's keys: the inverse of `stored_name`."""
    if name.startswith("/"):
        return keys_of_pointer(name)
    if kind is TensorKind.OPTIMIZER:
        key, _, parameter = name.partition(".")
        return (*OPTIMIZER, parameter, key)
    return MODEL, name


def order_of(spec: TensorSpec, place_of: Callable[[str], tuple[object, ...]] | None = None) -> tuple[object, ...]:
    """Return a sort key for a state dict's tensors. The order does not depend on which ranks hold them.

    Weights come first, then optimizer state by key with 0-d tensors last, then all other tensors.

    Args:
        place_of: Returns a name's sort key. None sorts in natural order, with `layers.10` after `layers.9`.
    """
    place_of = place_of or natural
    number = list(TensorKind).index(spec.kind)
    if spec.kind is TensorKind.OPTIMIZER and not spec.name.startswith("/"):
        key, _, parameter = spec.name.partition(".")
        return number, not spec.shape, key, place_of(parameter), spec.name
    return number, False, "", place_of(spec.name), spec.name


def natural(name: str) -> tuple[object, ...]:
    """Return a sort key comparing digit runs as numbers. Text and digits alternate in it."""
    parts = _DIGITS.split(name)
    return tuple((len(part.lstrip("0")), part.lstrip("0")) if number % 2 else part for number, part in enumerate(parts))


def _is_plain(key: str) -> bool:
    return bool(key) and not key.startswith("/")
