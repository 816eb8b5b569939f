"""Writes a torch.distributed.checkpoint folder for a transformers model and its AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from models.adapters import model_documents
from models.families import aliases, stored_tensors
from reprise.loading import Checkpoint
from reprise.storage import json_file
from trainer.interop.dcp.streaming import StreamingPlanner, sync_folder, write_folder
from trainer.interop.formats import ExportOptions
from trainer.interop.new_output import new_output
from trainer.interop.saved_run import SavedRun, saved_run
from trainer.interop.source import MOMENTS, STEP


def write(checkpoint: Checkpoint, out: Path, options: ExportOptions) -> None:
    """Write `out`, a folder for `dcp.load`, atomically. Only a single file's tensors are in memory.

    It contains `model`, with a tied output layer under both names. If the checkpoint has an optimizer, it also contains
    `optim` as returned by `get_optimizer_state_dict`, both nested and flattened. The iteration, sample and token counts
    are 0-d tensors. `config.json` lies beside.

    Raises:
        CheckpointError: `out` exists, the checkpoint is damaged, or the file system fails.
    """
    files, run = options.files, saved_run(checkpoint, to="DCP")
    source = run.source
    with new_output(out, files) as partial:
        files.make_folder(partial)
        state, names, total_bytes = _state(run)
        planner = StreamingPlanner(lambda index: source.read(names[index.fqn]).float() if index.fqn in names else None)
        write_folder(partial, state, planner, total_bytes=total_bytes)
        for name, document in model_documents(source.model).items():
            files.write_whole(partial / name, json_file.to_bytes(document))
        sync_folder(files, partial)


def _state(run: SavedRun) -> tuple[dict[str, Any], dict[str, str], int]:
    """Return the argument for `dcp.save`, with tensors on `meta`; their source names by key; and their byte count."""
    stored, alias_of = stored_tensors(run.source.model), aliases(run.source.model)
    names = {f"model.{name}": name for name in stored} | {f"model.{name}": origin for name, origin in alias_of.items()}
    model = {name: _empty(stored[alias_of.get(name, name)].shape) for name in (*stored, *alias_of)}
    nested: dict[str, Any] = {"model": model}
    total_bytes = sum(tensor.nbytes for tensor in model.values())
    if run.source.has_optimizer:
        state = dict[str, dict[str, torch.Tensor]]()
        for name in run.trained:
            state[name] = {STEP: _empty(()), **{kind: _empty(stored[name].shape) for kind in MOMENTS}}
            names |= {f"optim.state.{name}.{kind}": f"{kind}.{name}" for kind in state[name]}
        groups = [dict(group) for group in run.groups]
        flat = {f"param_groups.{n}.{k}": v for g in groups for n in g["params"] for k, v in g.items() if k != "params"}
        nested["optim"] = {"state": state, "param_groups": groups, **flat}
        total_bytes += sum(tensor.nbytes for kinds in state.values() for tensor in kinds.values())
    return nested | {name: torch.tensor(value) for name, value in run.counters.items()}, names, total_bytes


def _empty(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")
