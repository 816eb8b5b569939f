"""Objects with a state of their own, and nested values with the tensors taken out and put back.

The state of an object is a single value of the checkpoint: the result of `state_dict()`, with a reference in place of
each tensor. So a load needs no template, and gives `load_state_dict` the value from `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from reprise.errors import MismatchError
from reprise.format.layout import TensorSpec
from reprise.nested.stored_names import Keys, pointer, stored_name
from reprise.nested.typed_values import DICTS, TensorReference
from reprise.tensors.live import canonical_name, is_dtensor, named_tensors


class Stateful(Protocol):
    """An object with a state of its own, such as a scheduler, a scaler or a loader."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take the state."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """An object with a new state at the end of a load.

    Args:
        template: returns its current state, whose DTensors are filled in place.
        put: takes the state of the checkpoint.
        new: returns memory for a tensor that the template lacks; None for the host's.
    """

    template: Callable[[], object]
    put: Callable[[Any], object]
    new: Callable[[TensorSpec, str | None], torch.Tensor] | None = None

    def give(self, where: str, value: object) -> None:
        """Give the object the state of the checkpoint.

        Raises:
            MismatchError: with the error of the object, naming it.
        """
        with _taking(where):
            self.put(value)


@dataclass(frozen=True, slots=True)
class ModuleEntries:
    """What a module's own `state_dict()` has beyond its parameters and persistent buffers.

    Args:
        module: the outermost with a `state_dict()` of its own.
        keys: of the saved module that it is a part of.
        prefix: its name there, with a dot; empty for the saved module itself.
        taken: by name, the entries of the checkpoint at the end of a load.
    """

    module: nn.Module
    keys: Keys
    prefix: str
    taken: dict[str, Any] = field(default_factory=dict)

    def blank(self) -> torch.Tensor:
        """Return an empty tensor on the device of the module."""
        tensor = next((tensor for tensor in (*self.module.parameters(), *self.module.buffers())), None)
        return torch.empty(0, device="cpu" if tensor is None else tensor.device)

    def put(self, name: str, value: object) -> None:
        """Keep an entry of the checkpoint, without the prefix in its name, until `give`."""
        self.taken[name.removeprefix(self.prefix)] = value

    def give(self) -> list[str]:
        """Give the module its state dict with the entries taken, and return the names that it does not know.

        Raises:
            MismatchError: with the error of the module, naming it.
        """
        if not self.taken:
            return []
        with _taking(pointer((*self.keys, self.prefix.removesuffix(".")))):
            state = self.module.state_dict()
            keys = {canonical_name(key): key for key in state}
            state.update({keys.get(name, name): value for name, value in self.taken.items()})
            state.update({keys[name]: tensor for name, tensor in named_tensors(self.module) if name in keys})
            result = self.module.load_state_dict(state, strict=False)
        unknown = {canonical_name(key) for key in getattr(result, "unexpected_keys", ())}
        return [pointer((*self.keys, self.prefix + name)) for name in self.taken if name in unknown]


@contextmanager
def _taking(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise MismatchError(
            "An object does not take the state of the checkpoint",
            where=where,
            found=f"{type(error).__name__}: {error}",
            fix="Make it as it was made when the checkpoint was saved.",
        ) from error


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return whether a value is an object with `state_dict()` and `load_state_dict()`."""
    if isinstance(value, (type, torch.Tensor, dict, list, tuple)):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def take_out(value: object, keys: Keys, tensors: dict[Keys, torch.Tensor]) -> object:
    """Return a nested value with a reference in place of each tensor.

    Args:
        keys: the place of the value.
        tensors: receives the tensors by the keys under which they are stored.
    """
    kind: Any = type(value)
    if isinstance(value, torch.Tensor):
        tensors[keys] = value
        return TensorReference(stored_name(keys)[1], is_dtensor(value))
    if isinstance(value, dict) and kind in DICTS.values():
        changed: dict[Any, Any] = kind()
        for key, member in value.items():
            changed[key] = take_out(member, (*keys, key if isinstance(key, str) else repr(key)), tensors)
        return changed
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        return kind(take_out(member, (*keys, str(number)), tensors) for number, member in enumerate(value))
    return value


def put_back(value: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a value of `take_out` with the tensors, given by stored name, in place of the references."""
    kind: Any = type(value)
    if isinstance(value, TensorReference):
        return tensors[value.name]
    if isinstance(value, dict):
        changed: dict[Any, Any] = kind()
        for key, member in value.items():
            changed[key] = put_back(member, tensors)
        return changed
    if kind in (list, tuple):
        return kind(put_back(member, tensors) for member in value)  # type: ignore[attr-defined]
    return value


def shaped_like(template: object, value: Any) -> Any:
    """Return a value that was stored by leaf with the lists and tuples of a template, and keys in its order."""
    if not isinstance(value, dict):
        return value
    if isinstance(template, (list, tuple)) and value.keys() == {str(number) for number in range(len(value))}:
        members = [*template, *[None] * len(value)]
        return type(template)(shaped_like(members[number], value[str(number)]) for number in range(len(value)))
    if not isinstance(template, dict):
        return value
    shaped: dict[Any, Any] = type(value)()
    for key in (*(key for key in template if key in value), *(key for key in value if key not in template)):
        shaped[key] = shaped_like(template.get(key), value[key])
    return shaped


def references(value: object) -> Iterator[TensorReference]:
    """Yield the references to tensors in a value."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, TensorReference))


def leaves_of(value: object) -> Iterator[object]:
    """Yield what the lists, tuples and dicts of a nested value hold."""
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from leaves_of(member)
    elif isinstance(value, dict):
        for member in value.values():
            yield from leaves_of(member)
    else:
        yield value
