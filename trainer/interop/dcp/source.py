"""Reads torch.distributed.checkpoint folders written by FSDP2, DDP and torchtitan."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from reprise.errors import count_of
from trainer.interop.dcp import export as dcp_export
from trainer.interop.dcp.by_rank import open_any
from trainer.interop.dcp.folder import DcpFolder
from trainer.interop.dcp.names import LocatedKeys, locate, optimizer_keys
from trainer.interop.formats import Format, ImportOptions, common_step, few, require_moments
from trainer.interop.hf.folder import model_beside
from trainer.interop.source import STEP, StateSource
from trainer.interop.stored import require_tied

_log = logging.getLogger(__name__)

_COUNT = re.compile(r"(?:^|\.)(iteration|iter|iter_num|step|global_step)$")


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a DCP folder with a model under transformers' or torchtitan's names, with or without AdamW state.

    A `config.json` in the folder describes the model. Without it, the configuration does. The log lists the folder's
    other content. At most two tensors are in memory at a time.

    Raises:
        ConfigError: Pickles are not trusted.
        CheckpointError: `path` is not such a folder, or is damaged.
        MismatchError: The folder holds another model.
    """
    return source_of(open_any(path, options), options)


def source_of(folder: DcpFolder, options: ImportOptions) -> StateSource:
    """Return an open folder as a source. See `read_source`."""
    path = folder.path
    model = model_beside(path, options.config.model)
    located = locate(folder.tensors, folder.values, model, where=path, with_optimizer=not options.weights_only)
    if not located.has_optimizer and (signs := optimizer_keys(folder.tensors)):
        require_moments([f"{count_of(len(signs), 'tensor')} such as {signs[0]}"], options, where=path)
    steps = {
        name: common_step([folder.read_value(key)]) or 0.0
        for name, (key, _) in located.keys.items()
        if name.startswith(f"{STEP}.")
    }
    _log_content(folder, located)

    def read(name: str) -> torch.Tensor:
        return torch.tensor(steps[name]) if name in steps else _read(folder, located, name)

    return StateSource(model, int(max(steps.values(), default=0)), located.has_optimizer, read)


def _read(folder: DcpFolder, located: LocatedKeys, name: str) -> torch.Tensor:
    key, origin = located.keys[name]
    tensor = folder.read_tensor(key)
    if name in located.tied:
        alias = located.tied[name]
        require_tied(tensor, folder.read_tensor(alias), where=f"{folder.path}, {key} and {alias}")
    return origin.take(tensor)


def _log_content(folder: DcpFolder, located: LocatedKeys) -> None:
    """Log the naming scheme, and content not carried over. An iteration is carried over."""
    used = {key for key, _ in located.keys.values()} | set(located.tied.values())
    keys = {key for key in {*folder.tensors, *folder.values} - used if not _COUNT.search(key)}
    moments = "weights and moments" if located.has_optimizer else "weights alone"
    _log.info(f"{folder.path}: {moments} under names of {located.scheme}")
    if not located.has_optimizer and any(re.search(r"(^|\.)state\.\d+\.", key) for key in keys):
        _log.warning(
            "Optimizer state is stored by parameter number and is not carried over: get it by name from "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    if keys:
        parts = {"param_groups" if ".param_groups." in f".{key}" else key.split(".")[0] for key in keys}
        _log.info(f"not carried: {few(parts)}")


FORMAT = Format(
    "torch.distributed.checkpoint",
    "a torch.distributed.checkpoint (FSDP2, DDP, torchtitan) or torch_checkpointing folder",
    read_source,
    dcp_export.write,
)
