"""What a module's own `state_dict()` has beyond its parameters and persistent buffers, and its way back.

Only modules with an override or a hook are asked: `state_dict()` of all others has nothing else.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from reprise.errors import CheckpointError
from reprise.format.layout import TensorKind
from reprise.nested.stateful import ModuleEntries, leaves_of
from reprise.nested.stored_names import Keys, pointer
from reprise.nested.tree import Tree, add_object, require_text_keys
from reprise.tensors.file_form import bytes_of
from reprise.tensors.live import Grid, canonical_name, is_dtensor, local_of, locate, memory_holder, named_tensors

_EXTRA_STATE = "_extra_state"  # torch's name for it in a state dict


def add_entries(tree: Tree, keys: Keys, model: nn.Module) -> None:
    """Add the further entries of a module, each as a whole, which the module takes back at the end of a load.

    Raises:
        CheckpointError: naming an unstorable entry, or a parameter or buffer that the module's `state_dict()` gives in
            another form: which of both counts, is unknown.
    """
    covered_modules: set[nn.Module] = set()
    for name, module in model.named_modules():
        prefix = canonical_name(f"{name}." if name else "")
        if module in covered_modules:
            continue
        if _has_own_state_dict(module):
            covered_modules.update(module.modules())
            entries = tree.modules[keys, prefix] = ModuleEntries(module, keys, prefix)
            for key, value in _further(entries).items():
                inner = prefix + key
                add_object(tree, (*keys, inner), partial(_given, value), partial(entries.put, inner))
        elif type(module).get_extra_state is not nn.Module.get_extra_state:
            add_object(tree, (*keys, prefix + _EXTRA_STATE), module.get_extra_state, module.set_extra_state)


def _further(entries: ModuleEntries) -> dict[str, object]:
    """Return the entries that are neither parameters nor buffers, nor views of them."""
    state, tensors = entries.module.state_dict(), dict(named_tensors(entries.module))
    require_text_keys(state, (*entries.keys, entries.prefix))
    values = {canonical_name(key): value for key, value in state.items()}
    other_forms = [name for name, tensor in tensors.items() if name in values and not _is_same(values[name], tensor)]
    memory = {_memory(tensor) for tensor in tensors.values()}
    further_values = {
        name: value
        for name, value in values.items()
        if name not in tensors and not (isinstance(value, torch.Tensor) and _memory(value) in memory)
    }
    if any(_has_tensor(value) and name.rpartition(".")[2] != _EXTRA_STATE for name, value in further_values.items()):
        shown_memory = {_memory(leaf) for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)}
        other_forms += [
            name for name, tensor in tensors.items() if name not in values and _memory(tensor) not in shown_memory
        ]
    if other_forms:
        raise CheckpointError(
            "The state_dict() of a module gives one of its parameters or buffers in another form",
            where=pointer((*entries.keys, entries.prefix + other_forms[0])),
            found=type(entries.module).__name__,
            fix="Give module.state_dict() to `save_state_dict`, fill one by `load_state_dict`, and give it to the "
            "module's load_state_dict.",
        )
    return further_values


def _has_tensor(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(value))


def _has_own_state_dict(module: nn.Module) -> bool:
    """Return whether a module overrides its state dict, or has hooks for it other than those of torch.distributed."""
    for method, base in (("state_dict", nn.Module.state_dict), ("_save_to_state_dict", nn.Module._save_to_state_dict)):
        if getattr(getattr(module, method), "__func__", None) is not base:
            return True
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return any(not (getattr(hook, "__module__", "") or "").startswith("torch.distributed.") for hook in hooks)


def _is_same(value: object, tensor: torch.Tensor) -> bool:
    """Return whether an entry is a live tensor, or has its bits, or those of its cast to another dtype."""
    if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
        return False
    if is_dtensor(tensor) and not is_dtensor(value):  # a hook has gathered it
        for part in locate(TensorKind.MODEL, "", tensor, grid=Grid.flat(1)):
            value = value[part.box.slices]
    memory, live = local_of(value), local_of(tensor)
    if memory.is_set_to(live):
        return True
    return memory.shape == live.shape and bytes_of(memory).to(live.device).equal(bytes_of(live.to(memory.dtype)))


def _memory(tensor: torch.Tensor) -> int | None:
    try:
        return int(memory_holder(tensor).untyped_storage()._cdata)
    except RuntimeError:  # such as a sparse tensor, which a save names
        return None


def _given(value: object) -> object:
    return value
