"""A module's own `state_dict()` entries beyond its parameters and persistent buffers, and loading them back.

A module is called only if it or a submodule has an override or a hook: otherwise `state_dict()` has nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from reprise.errors import CheckpointError, MismatchError
from reprise.nested.stored_names import Keys, pointer
from reprise.nested.typed_values import leaves, require_text_keys
from reprise.tensors.file_form import bytes_of
from reprise.tensors.live import canonical_name, local_of, memory_holder, named_tensors

_EXTRA_STATE = "_extra_state"  # torch's state dict key for it


@dataclass(frozen=True, slots=True)
class Receiver:
    """Receives a new state at the end of a load.

    Args:
        template: Returns the current state, whose sharded tensors are filled in place.
        put: Receives the checkpoint's state.
        is_value: Whether the state is a value in a container, which is no template for tensors.
        owner: The tensor beside which a load creates this optimizer state: its parameter, or one on the host for a
            step counter there. None for other state.
    """

    template: Callable[[], Any]
    put: Callable[[Any], object]
    is_value: bool = False
    owner: torch.Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the current value is an empty dict, which requires nothing."""
        return self.is_value and isinstance(current := self.template(), dict) and not current


def hand_over(where: str, receive: Callable[..., Any], *state: object) -> Any:
    """Return what an object answers to its state from the checkpoint.

    Raises:
        MismatchError: The object raised an error.
    """
    try:
        return receive(*state)
    except Exception as error:
        raise MismatchError(
            "An object rejected its state from the checkpoint",
            where=where,
            found=f"{type(error).__name__}: {error}",
            fix="Build it as it was when the checkpoint was saved.",
        ) from error


@dataclass(frozen=True, slots=True)
class ModuleEntries:
    """The entries in a module's `state_dict()` beyond its parameters and persistent buffers.

    Args:
        keys: The module's keys in the tree.
        received: The checkpoint's entries by name, filled at the end of a load.
    """

    module: nn.Module
    keys: Keys
    received: dict[str, Any] = field(default_factory=dict)

    def receiver(self, name: str, value: object = None) -> Receiver:
        """Return a receiver that collects an entry until `load`.

        Args:
            value: The entry's current value. None if the module has no such entry.
        """
        return Receiver(lambda: value, partial(self.received.__setitem__, name))

    def load(self) -> list[str]:
        """Load the collected entries into the module, and return the names unknown to it.

        Raises:
            MismatchError: The module raised an error.
        """
        unknown = hand_over(pointer(self.keys), self._fill_module) if self.received else set()
        return [pointer((*self.keys, name)) for name in self.received if name in unknown]

    def _fill_module(self) -> set[str]:
        state = self.module.state_dict()
        keys = {canonical_name(key): key for key in state}
        parents = {_parent(name): _parent(key) for name, key in keys.items()}  # a new entry's, as of a compiled module
        for name, value in self.received.items():
            parent = _parent(name)
            state[keys.get(name, parents.get(parent, parent) + name.removeprefix(parent))] = value
        state.update({keys[name]: tensor for name, tensor in named_tensors(self.module) if name in keys})
        result = self.module.load_state_dict(state, strict=False)
        return {canonical_name(key) for key in getattr(result, "unexpected_keys", ())}

    def current(self) -> dict[str, object]:
        """Return the module's entries that are neither parameters nor buffers, nor views into them.

        Raises:
            CheckpointError: A key cannot be stored, or the module's `state_dict()` returns a parameter or buffer in
                another form, which leaves open which form counts.
        """
        state, tensors = self.module.state_dict(), dict(named_tensors(self.module))
        require_text_keys(state, self.keys)
        values = {canonical_name(key): value for key, value in state.items()}
        memory, memory_of_values = _memory_in(tensors), _memory_in(values)
        extra_values = {
            name: value
            for name, value in values.items()
            if name not in tensors and not (isinstance(value, torch.Tensor) and _memory(value) in memory)
        }
        # By module, tensors under other names may stand for the parameters that are left out.
        substitutes = {
            _parent(name)
            for name, value in extra_values.items()
            if _memory_in(value) and not name.endswith(_EXTRA_STATE)
        }
        for name, tensor in tensors.items():
            is_left_out = (
                name not in values
                and _memory(tensor) not in memory_of_values
                and any(map(name.startswith, substitutes))
            )
            if is_left_out or (name in values and not _is_same(values[name], tensor)):
                raise CheckpointError(
                    "A module's state_dict() returns a parameter or buffer in another form",
                    where=pointer((*self.keys, name)),
                    fix="Pass module.state_dict() to `save_state_dict`. To load, fill a state dict with "
                    "`load_state_dict`, and pass it to module.load_state_dict().",
                )
        return extra_values


def refuse_flat_shards(keys: Keys, model: nn.Module) -> None:
    """Refuse FSDP1, whose parameters are flat shards: plain tensors with different elements on each rank.

    Raises:
        CheckpointError: Names the sharded module.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel" and module.sharding_strategy.name != "NO_SHARD":
            raise CheckpointError(
                "A module is sharded by FSDP1, which stores its parameters as parts of a flat tensor",
                where=pointer((*keys, name) if name else keys),
                expected="a plain, DDP, FSDP2 or tensor-parallel module",
                fix="Wrap it with device_mesh=, pass the results of get_model_state_dict and get_optimizer_state_dict "
                "from torch.distributed.checkpoint.state_dict, and call set_state_dict after a load.",
            )


def has_own_entries(module: nn.Module) -> bool:
    """Return whether a module has extra state, overrides `state_dict`, or has hooks from outside torch.distributed."""
    for method in ("state_dict", "_save_to_state_dict", "get_extra_state"):
        if getattr(getattr(module, method), "__func__", None) is not getattr(nn.Module, method):
            return True
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return any(not (getattr(hook, "__module__", "") or "").startswith("torch.distributed.") for hook in hooks)


def _is_same(value: object, tensor: torch.Tensor) -> bool:
    """Return whether an entry is a live tensor, has its bits, or has the bits of its cast."""
    if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
        return False
    memory, live = local_of(value), local_of(tensor)
    if memory.is_set_to(live):
        return True
    return memory.shape == live.shape and bytes_of(memory).to(live.device).equal(bytes_of(live.to(memory.dtype)))


def _parent(name: str) -> str:
    """Return the prefix of an entry's name: its module, with a trailing dot unless it is the outermost."""
    return name[: name.rfind(".") + 1]


def _memory_in(value: object) -> set[object]:
    """Return the identities of the memory in a value's tensors."""
    return {_memory(leaf) for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)}


def _memory(tensor: torch.Tensor) -> object:
    try:
        return memory_holder(tensor).untyped_storage()._cdata
    except RuntimeError:  # such as a sparse tensor, which a save reports
        return None
