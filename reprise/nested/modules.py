"""A module's state beyond its parameters and persistent buffers, and the receivers of new state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reprise.errors import CheckpointError, MismatchError
from reprise.nested.stored_names import Keys, pointer
from reprise.tensors.live import canonical_name, memory_holder, named_tensors


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


def hand_over(where: str, receive: Callable[[Any], object], state: object) -> None:
    """Pass an object its state from the checkpoint.

    Raises:
        MismatchError: The object raised an error.
    """
    try:
        receive(state)
    except Exception as error:
        raise MismatchError(
            "An object rejected its state from the checkpoint",
            where=where,
            found=f"{type(error).__name__}: {error}",
            fix="Build it as it was when the checkpoint was saved.",
        ) from error


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each submodule with extra state, after the state's name in `module.state_dict()`."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield canonical_name(f"{prefix}._extra_state".removeprefix(".")), each


def refuse_own_entries(keys: Keys, module: nn.Module) -> None:
    """Refuse a module whose `state_dict()` has more than its tensors, views into them, and extra state.

    Its `state_dict()` is called only if it or a submodule has an override or a hook: otherwise there is nothing else.

    Raises:
        CheckpointError: Names the first such entry.
    """
    if not any(map(_has_own_entries, module.modules())):
        return
    tensors = dict(named_tensors(module))
    names, memory = {*tensors, *dict(extra_states(module))}, {*map(_memory, tensors.values())} - {None}
    for key, value in module.state_dict().items():
        name = canonical_name(str(key))
        if name not in names and _memory(value) not in memory:
            raise CheckpointError(
                "A module's state_dict() has an entry beyond its parameters, persistent buffers and extra state",
                where=pointer((*keys, name)),
                fix="Pass module.state_dict() to `save_state_dict`. To load, fill a state dict with "
                "`load_state_dict`, and pass it to module.load_state_dict().",
            )


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


def _has_own_entries(module: nn.Module) -> bool:
    """Return whether a module overrides `state_dict`, or has hooks from outside torch.distributed."""
    for method in ("state_dict", "_save_to_state_dict"):
        if getattr(getattr(module, method), "__func__", None) is not getattr(nn.Module, method):
            return True
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return any(not (getattr(hook, "__module__", "") or "").startswith("torch.distributed.") for hook in hooks)


def _memory(value: object) -> object:
    """Return the identity of a strided tensor's storage. None for anything else."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return memory_holder(value).untyped_storage()._cdata
    return None
