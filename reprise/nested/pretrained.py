"""The files and tensor names with which transformers' and PEFT's `from_pretrained` open a save."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reprise.format.layout import TensorKind
from reprise.storage.paths import exists
from reprise.tensors.live import canonical_name

_WRAPPER = "module."  # DistributedDataParallel's prefix for parameter names


@dataclass(frozen=True, slots=True)
class PretrainedForm:
    """A model in another library's form. Empty if the model belongs to none, or if that library could not open it.

    Args:
        files: File contents by name.
        stored_as: By name in the model: the file family and the name in the other library, for tensors whose name
            differs.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    stored_as: dict[str, tuple[TensorKind, str]] = field(default_factory=dict)


def form_of(model: object, names: Sequence[str]) -> PretrainedForm:
    """Return a model in the form expected by transformers or PEFT.

    Args:
        names: The tensor names in the model.
    """
    prefix = ""
    peft: Any = sys.modules.get("peft")
    while isinstance(model, nn.Module):
        if isinstance(model, getattr(peft, "PeftModel", ())):
            return _of_peft(peft, model, prefix, names)
        if config := _text(model, "config"):
            if hasattr(model, "peft_config"):  # PEFT's get_peft_model did not add the adapter
                return PretrainedForm()
            return _renamed(_transformers_files(model, config), prefix, {}, names)
        prefix += _WRAPPER if isinstance(model, nn.parallel.DistributedDataParallel) else ""
        model = getattr(model, "module", getattr(model, "_orig_mod", None))
    return PretrainedForm()


def _renamed(files: dict[str, bytes], prefix: str, adapter: Mapping[str, str], names: Sequence[str]) -> PretrainedForm:
    """Return the form with each tensor's name.

    Args:
        prefix: The prefix in all tensor names, which the other library does not use.
        adapter: By name in the model without the prefix, the tensor name in PEFT's file. Tied tensors share a name.
    """
    bare_names = {name: name.removeprefix(prefix) for name in names}
    places = {
        name: (TensorKind.ADAPTER, adapter[bare]) if bare in adapter else (TensorKind.MODEL, bare)
        for name, bare in bare_names.items()
    }
    if not {*adapter.values()} <= {name for _, name in places.values()}:
        return PretrainedForm()
    renamed = {name: place for name, place in places.items() if place != (TensorKind.MODEL, name)}
    return PretrainedForm(files, renamed)


def _transformers_files(model: nn.Module, text: str) -> dict[str, bytes]:
    """Return a transformers model's configuration files, as its `save_pretrained` writes them.

    Args:
        text: Its configuration.
    """
    config: dict[str, Any] = json.loads(text)
    kinds = [kind.__name__ for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP")]
    config["architectures"] = config.get("architectures") or kinds[:1]
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    if dtypes:
        config["dtype"] = str(dtypes[0]).removeprefix("torch.")
    files = {"config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
    if generation_config := _text(model, "generation_config"):
        files["generation_config.json"] = generation_config.encode()
    return files


def _of_peft(peft: Any, model: Any, prefix: str, all_names: Sequence[str]) -> PretrainedForm:
    # PEFT stores each of several adapters in its own folder. For prompts, it would run the prompt encoder, which
    # changes CPT's prompts.
    if len(model.peft_config) != 1 or any(config.is_prompt_learning for config in model.peft_config.values()):
        return PretrainedForm()
    ((adapter_name, config),) = model.peft_config.items()
    # PEFT selects and renames state dict members. Meta tensors reveal how without using memory.
    state = model.state_dict(keep_vars=True)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    stand_ins = {key: torch.empty(value.shape, dtype=value.dtype, device="meta") for key, value in tensors.items()}
    keys = {id(stand_in): key for key, stand_in in stand_ins.items()}
    base = config.base_model_name_or_path
    # Whether resized embeddings are stored too, if their original size is known without asking the hub.
    save_embedding_layers = "auto" if not base or exists(Path(base, "config.json")) else False
    try:
        selected = peft.get_peft_model_state_dict(
            model, dict(stand_ins), adapter_name, save_embedding_layers=save_embedding_layers
        )
    except (RuntimeError, ValueError):  # from a method that reads values, or refuses to save
        return PretrainedForm()
    # Among tied tensors, only the last name is stored: a method appends the name it looks for.
    own_names = {name: keys[id(value)] for name, value in selected.items() if id(value) in keys}
    names = {id(tensors[own_name]): name for name, own_name in own_names.items()}
    is_in_file = {*names.values(), *(n for n, own_name in own_names.items() if ".modules_to_save." not in own_name)}
    if selected.keys() - is_in_file:  # PEFT computes them, or looks for them beside a tied tensor
        return PretrainedForm()
    adapter = {canonical_name(own_name): names[id(tensors[own_name])] for own_name in own_names.values()}
    return _renamed({"adapter_config.json": _adapter_config(model, config)}, prefix, adapter, all_names)


def _adapter_config(model: Any, config: Any) -> bytes:
    """Return PEFT's configuration file as `save_pretrained` writes it, with sets sorted: all ranks write the same."""
    members = config.to_dict()
    base = model.base_model.model
    members["base_model_name_or_path"] = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    members["inference_mode"] = True
    if config.task_type is None:
        kind = type(base)
        members["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in members.items()}
    return json.dumps(plain, indent=2, sort_keys=True).encode()


def _text(model: object, attribute: str) -> str:
    return str(getattr(getattr(model, attribute, None), "to_json_string", str)())
