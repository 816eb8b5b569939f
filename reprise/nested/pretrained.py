"""The files and the tensor names with which `from_pretrained` of transformers and of PEFT opens a save."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reprise.format.layout import TensorKind
from reprise.nested.stored_names import MODEL
from reprise.nested.tree import Tree
from reprise.paths import exists
from reprise.tensors.live import canonical_name

_WRAPPER = "module."  # of DistributedDataParallel, in the names of its parameters


@dataclass(frozen=True, slots=True)
class PretrainedForm:
    """A model in the form of another library.

    Args:
        files: by name.
        prefix: of the names of all tensors, which the other library does not have.
        adapter: the name of each tensor in PEFT's file, by its name in the model without the prefix.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    prefix: str = ""
    adapter: dict[str, str] = field(default_factory=dict)


def add_pretrained(tree: Tree, model: object) -> None:
    """Add the files of transformers or PEFT to a tree with the tensors of a model, and their names there.

    Adds nothing for any other model, and for a model of PEFT whose file would differ from the tensors of the model: one
    of several adapters, which PEFT stores in a folder each, and one with a method for prompts, which computes it.
    """
    form = _form_of(model)
    if form is None:
        return
    if not form.prefix and not form.adapter:
        tree.files |= form.files
        return
    own_names = {keys[1]: keys for keys in tree.tensors if len(keys) == 2 and keys[0] == MODEL}
    names: dict[str, tuple[TensorKind, str]] = {}
    for own_name in own_names:
        name = own_name.removeprefix(form.prefix)
        is_adapter = name in form.adapter
        names[own_name] = (TensorKind.ADAPTER, form.adapter[name]) if is_adapter else (TensorKind.MODEL, name)
    stored = [name for _, name in names.values()]
    lacking = {*form.adapter.values()} - {*stored}
    if lacking or len({*stored}) < len(stored) or not tree.dtypes.keys().isdisjoint(own_names):
        return
    tree.stored_as = {own_names[name]: place for name, place in names.items() if place != (TensorKind.MODEL, name)}
    tree.files |= form.files


def _form_of(model: object) -> PretrainedForm | None:
    prefix = ""
    peft: Any = sys.modules.get("peft")
    while isinstance(model, nn.Module):
        if isinstance(model, getattr(peft, "PeftModel", ())):
            return _of_peft(peft, model, prefix)
        if _has_text(model, "config"):
            # An adapter that transformers itself has added has names that neither library reads beside a base.
            return None if hasattr(model, "peft_config") else PretrainedForm(_transformers_files(model), prefix)
        prefix += _WRAPPER if isinstance(model, nn.parallel.DistributedDataParallel) else ""
        model = getattr(model, "module", getattr(model, "_orig_mod", None))
    return None


def _transformers_files(model: nn.Module) -> dict[str, bytes]:
    """Return the configurations of a model of transformers, as its `save_pretrained` writes them."""
    config: dict[str, Any] = json.loads(_text(model, "config"))
    kinds = [kind.__name__ for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP")]
    config["architectures"] = config.get("architectures") or kinds[:1]
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    if dtypes:
        config["dtype"] = str(dtypes[0]).removeprefix("torch.")
    files = {"config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
    if _has_text(model, "generation_config"):
        files["generation_config.json"] = _text(model, "generation_config").encode()
    return files


def _of_peft(peft: Any, model: Any, prefix: str) -> PretrainedForm | None:
    if len(model.peft_config) != 1:
        return None
    ((adapter_name, config),) = model.peft_config.items()
    # PEFT selects and renames members of a state dict. Tensors without memory show how, and cost nothing.
    state = model.state_dict(keep_vars=True)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    stand_ins = {key: torch.empty(value.shape, dtype=value.dtype, device="meta") for key, value in tensors.items()}
    keys = {id(stand_in): key for key, stand_in in stand_ins.items()}
    selected = peft.get_peft_model_state_dict(
        model,
        state_dict=dict(stand_ins),
        adapter_name=adapter_name,
        save_embedding_layers=_save_embedding_layers(config.base_model_name_or_path),
    )
    if any(id(value) not in keys for value in selected.values()):
        return None
    if len({id(tensors[keys[id(value)]]) for value in selected.values()}) < len(selected):  # tied ones are stored once
        return None
    adapter = {canonical_name(keys[id(value)]): name for name, value in selected.items()}
    return PretrainedForm({"adapter_config.json": _adapter_config(model, config)}, prefix, adapter)


def _save_embedding_layers(base: str | None) -> str | bool:
    """Return PEFT's option to store resized embeddings where no hub has to be asked for their first size."""
    return "auto" if not base or exists(Path(base, "config.json")) else False


def _adapter_config(model: Any, config: Any) -> bytes:
    """Return the file that `save_pretrained` of a model of PEFT writes, with sets in order: ranks write the same."""
    members = config.to_dict()
    base = model.base_model.model
    members["base_model_name_or_path"] = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    members["inference_mode"] = True
    if config.task_type is None:
        kind = type(base)
        members["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in members.items()}
    return json.dumps(plain, indent=2, sort_keys=True).encode()


def _has_text(model: object, attribute: str) -> bool:
    return callable(getattr(getattr(model, attribute, None), "to_json_string", None))


def _text(model: object, attribute: str) -> str:
    return str(getattr(model, attribute).to_json_string())
