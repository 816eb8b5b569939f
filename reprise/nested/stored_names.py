"""The names under which the leaves of a nested state dict are stored: a function of their keys alone, and one to one.

`state["model"][NAME]` is a weight and keeps its name, `state["optimizer"]["state"][NAME][KEY]` is stored as `KEY.NAME`
as every optimizer's, and every other leaf under its JSON Pointer (RFC 6901), which begins with a slash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from reprise.format.layout import TensorKind, TensorSpec

Keys = tuple[str, ...]  # from the outermost; the place in a list is a decimal number

MODEL = "model"
OPTIMIZER = ("optimizer", "state")
PER_RANK = "per_rank"  # below it, by the rank's number, what each rank has of its own
RNG = "rng"  # there, the random state
_DIGITS = re.compile("([0-9]+)")


def pointer(keys: Sequence[str]) -> str:
    """Return the JSON Pointer to a leaf; empty for the state dict itself."""
    return "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in keys)


def keys_of_pointer(text: str) -> Keys:
    """Return the keys in a JSON Pointer."""
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])


def is_random_state(keys: Keys) -> bool:
    """Return whether keys lead to the random state of a rank, or below it."""
    return keys[0] == PER_RANK and keys[2:3] == (RNG,)


def stored_name(keys: Keys) -> tuple[TensorKind, str]:
    """Return the family of files and the stored name of a tensor."""
    match keys:
        case (top, name) if top == MODEL and _is_plain(name):
            return TensorKind.MODEL, name
        case (*top, name, key) if tuple(top) == OPTIMIZER and name and _is_plain(key) and "." not in key:
            return TensorKind.OPTIMIZER, f"{key}.{name}"
    return TensorKind.EXTRA, pointer(keys)


def keys_of(kind: TensorKind, name: str) -> Keys:
    """Return the keys of a stored tensor: the inverse of `stored_name`."""
    if name.startswith("/"):
        return keys_of_pointer(name)
    if kind is TensorKind.OPTIMIZER:
        key, _, parameter = name.partition(".")
        return (*OPTIMIZER, parameter, key)
    return MODEL, name


def order_of(spec: TensorSpec, place_of: Callable[[str], tuple[object, ...]] | None = None) -> tuple[object, ...]:
    """Return a sort key for the tensors of a state dict: their ranks have no part in the order.

    Weights come first, then optimizer state by key with 0-d tensors last, then the rest.

    Args:
        place_of: returns the sort key of a name; None for the natural order, in which `layers.10` follows `layers.9`.
    """
    place_of = place_of or natural
    number = list(TensorKind).index(spec.kind)
    if spec.kind is TensorKind.OPTIMIZER and not spec.name.startswith("/"):
        key, _, parameter = spec.name.partition(".")
        return number, not spec.shape, key, place_of(parameter), spec.name
    return number, False, "", place_of(spec.name), spec.name


def natural(name: str) -> tuple[object, ...]:
    """Return a sort key with runs of digits compared as numbers; text and digits alternate in it."""
    parts = _DIGITS.split(name)
    return tuple((len(part.lstrip("0")), part.lstrip("0")) if number % 2 else part for number, part in enumerate(parts))


def _is_plain(key: str) -> bool:
    return bool(key) and not key.startswith("/")
