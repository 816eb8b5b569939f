"""A module's own `state_dict()` entries beyond its parameters and persistent buffers, and loading them back.

Only modules with an override or a hook are called: other modules' `state_dict()` has nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from reprise.errors import CheckpointError, MismatchError
from reprise.nested.stored_names import Keys, pointer
from reprise.nested.typed_values import leaves, require_text_keys
from reprise.tensors.file_form import bytes_of
from reprise.tensors.live import canonical_name, local_of, memory_holder, named_tensors

T = TypeVar("T")
_EXTRA_STATE = "_extra_state"  # torch's state dict key for it


@dataclass(frozen=True, slots=True)
class Receiver:
    """Receives a new state at the end of a load.

    Args:
        template: Returns the current state, whose sharded tensors are filled in place.
        put: Receives the checkpoint's state.
        is_value: Whether the state is a value in a container. A load needs a template for tensors, so it reads no
            sharded tensor for it.
        owner: The parameter whose optimizer state this is, which a load creates.
        on_host: Whether the state is a step counter on the host.
    """

    template: Callable[[], Any]
    put: Callable[[Any], object]
    is_value: bool = False
    owner: nn.Parameter | None = None
    on_host: bool = False

    @property
    def is_open(self) -> bool:
        """Return whether the current value is an empty dict, which takes whatever needs no template."""
        return self.is_value and isinstance(current := self.template(), dict) and not current


def hand_over(where: str, receive: Callable[..., T], *state: object) -> T:
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
    """The entries from a module's own `state_dict()`, in a load.

    Args:
        module: The outermost module with its own `state_dict()`.
        keys: The keys of the saved module containing it.
        prefix: Its name in the saved module, with a trailing dot. Empty for the saved module itself.
        received: The checkpoint's entries by name, filled at the end of a load.
    """

    module: nn.Module
    keys: Keys
    prefix: str
    received: dict[str, Any] = field(default_factory=dict)

    def receiver(self, name: str, template: Callable[[], Any] | None = None) -> Receiver:
        """Return a receiver that collects an entry until `load`. The entry's name starts with the prefix."""
        return Receiver(template or self._blank, partial(self.received.__setitem__, name.removeprefix(self.prefix)))

    def _blank(self) -> torch.Tensor:
        tensor = next(iter((*self.module.parameters(), *self.module.buffers())), None)
        return torch.empty(0, device="cpu" if tensor is None else tensor.device)

    def load(self) -> list[str]:
        """Load the collected entries into the module, and return the names unknown to it.

        Raises:
            MismatchError: The module raised an error.
        """
        where = pointer((*self.keys, self.prefix.removesuffix(".")))
        unknown = hand_over(where, self._fill_module) if self.received else set()
        return [pointer((*self.keys, self.prefix + name)) for name in self.received if name in unknown]

    def _fill_module(self) -> set[str]:
        state = self.module.state_dict()
        keys = {canonical_name(key): key for key in state}
        state.update({keys.get(name, name): value for name, value in self.received.items()})
        state.update({keys[name]: tensor for name, tensor in named_tensors(self.module) if name in keys})
        result = self.module.load_state_dict(state, strict=False)
        return {canonical_name(key) for key in getattr(result, "unexpected_keys", ())}


def entries_of(keys: Keys, model: nn.Module) -> tuple[list[ModuleEntries], dict[str, Receiver]]:
    """Return the submodules with their own `state_dict()`, and the extra entries by name.

    Raises:
        CheckpointError: A key cannot be stored, or the module's `state_dict()` returns a parameter or buffer in another
            form, which leaves open which form counts.
    """
    parts: list[ModuleEntries] = []
    receivers: dict[str, Receiver] = {}
    covered_modules: set[nn.Module] = set()
    for name, module in model.named_modules():
        prefix = canonical_name(f"{name}." if name else "")
        if module in covered_modules:
            continue
        if _has_own_state_dict(module):
            covered_modules.update(module.modules())
            part = ModuleEntries(module, keys, prefix)
            parts.append(part)
            extra = _extra_entries(part)
            receivers |= {prefix + key: part.receiver(prefix + key, partial(extra.get, key)) for key in extra}
        elif type(module).get_extra_state is not nn.Module.get_extra_state:
            receivers[prefix + _EXTRA_STATE] = Receiver(module.get_extra_state, module.set_extra_state)
    return parts, receivers


def refuse_flat_shards(keys: Keys, model: nn.Module) -> None:
    """Refuse FSDP1, whose parameters are flat shards: plain tensors with different elements on each rank.

    Raises:
        CheckpointError: Names the sharded module.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FullyShardedDataParallel) and (  # type: ignore[union-attr]
            module.sharding_strategy != fsdp.ShardingStrategy.NO_SHARD  # type: ignore[union-attr]
        ):
            raise CheckpointError(
                "A module is sharded by FSDP1, which stores its parameters as parts of a flat tensor",
                where=pointer((*keys, name) if name else keys),
                expected="a plain, DDP, FSDP2 or tensor-parallel module",
                found=type(module).__name__,
                fix="Wrap it with device_mesh=, pass the results of get_model_state_dict and get_optimizer_state_dict "
                "from torch.distributed.checkpoint.state_dict, and call set_state_dict after a load.",
            )


def _extra_entries(entries: ModuleEntries) -> dict[str, object]:
    """Return the entries that are neither parameters nor buffers, nor views into them."""
    state, tensors = entries.module.state_dict(), dict(named_tensors(entries.module))
    require_text_keys(state, (*entries.keys, entries.prefix))
    values = {canonical_name(key): value for key, value in state.items()}
    other_forms = [name for name, tensor in tensors.items() if name in values and not _is_same(values[name], tensor)]
    memory = {_memory(tensor) for tensor in tensors.values()}
    extra_values = {
        name: value
        for name, value in values.items()
        if name not in tensors and not (isinstance(value, torch.Tensor) and _memory(value) in memory)
    }
    if any(_has_tensor(value) and name.rpartition(".")[2] != _EXTRA_STATE for name, value in extra_values.items()):
        shown_memory = {_memory(leaf) for _, leaf in leaves(values) if isinstance(leaf, torch.Tensor)}
        other_forms += [
            name for name, tensor in tensors.items() if name not in values and _memory(tensor) not in shown_memory
        ]
    if other_forms:
        raise CheckpointError(
            "A module's state_dict() returns a parameter or buffer in another form",
            where=pointer((*entries.keys, entries.prefix + other_forms[0])),
            found=type(entries.module).__name__,
            fix="Pass module.state_dict() to `save_state_dict`. To load, fill a state dict with `load_state_dict`, and "
            "pass it to module.load_state_dict().",
        )
    return extra_values


def _has_tensor(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(value))


def _has_own_state_dict(module: nn.Module) -> bool:
    """Return whether a module overrides `state_dict`, or has hooks for it from outside torch.distributed."""
    for method, base in (("state_dict", nn.Module.state_dict), ("_save_to_state_dict", nn.Module._save_to_state_dict)):
        if getattr(getattr(module, method), "__func__", None) is not base:
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


def _memory(tensor: torch.Tensor) -> int | None:
    try:
        return int(memory_holder(tensor).untyped_storage()._cdata)
    except RuntimeError:  # such as a sparse tensor, which a save reports
        return None
