"""Writes a torch.distributed.checkpoint folder for a transformers model and its AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.adapters import model_documents
from models.config import ModelConfig
from models.families import aliases, stored_tensors
from reprise.errors import MismatchError
from reprise.format import STATE
from reprise.loading import Checkpoint
from reprise.storage import finite_number, json_file
from trainer.config.optimizer import OptimizerSection
from trainer.interop.dcp.streaming import StreamingPlanner, sync_folder, write_folder
from trainer.interop.formats import ExportOptions, require_float32
from trainer.interop.new_output import new_output
from trainer.interop.source import MOMENTS, STEP, of_checkpoint
from trainer.optim.table import no_decay_names
from trainer.record.data_origin import reading_state
from trainer.record.run_record import saved_frozen, saved_schedule
from trainer.schedules.progress import Progress


@dataclass(frozen=True, slots=True)
class SavedAdam:
    """A parameter group's AdamW settings.

    `no_decay` names the parameters in the second group. `frozen` names those in neither group.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    no_decay: frozenset[str]
    frozen: frozenset[str]


def write(checkpoint: Checkpoint, out: Path, options: ExportOptions) -> None:
    """Write `out`, a folder for `dcp.load`, atomically. Only a single file's tensors are in memory.

    It contains `model`, with a tied output layer under both names. If the checkpoint has an optimizer, it also contains
    `optim` as returned by `get_optimizer_state_dict`, both nested and flattened. The iteration, sample and token counts
    are 0-d tensors. `config.json` lies beside.

    Raises:
        ConfigError: The options request another dtype than float32, or a tokenizer.
        CheckpointError: `out` exists, the checkpoint is damaged, or the file system fails.
    """
    require_float32(options, "DCP", where=out)
    files, source = options.files, of_checkpoint(checkpoint)
    adam = saved_adam(checkpoint, source.model) if source.has_optimizer else None
    counters = saved_counters(checkpoint)
    with new_output(out, files) as partial:
        files.make_folder(partial)
        state = _state(source.model, adam, counters)
        planner = StreamingPlanner(
            lambda index: source.read(state.names[index.fqn]).float() if index.fqn in state.names else None
        )
        write_folder(partial, state.nested, planner, total_bytes=state.total_bytes)
        for name, document in model_documents(source.model).items():
            files.write_whole(partial / name, json_file.to_bytes(document))
        sync_folder(files, partial)


def saved_counters(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the iteration, and the consumed sample and token counts.

    Raises:
        CheckpointError: The state file has no counts.
    """
    with reading_state("progress", checkpoint.path / STATE):
        progress = Progress.from_record(checkpoint.state)
    return {name: getattr(progress, name) for name in ("iteration", "consumed_samples", "consumed_tokens")}


def saved_adam(checkpoint: Checkpoint, config: ModelConfig, *, to: str = "DCP") -> SavedAdam:
    """Return a checkpoint's optimizer settings.

    Args:
        to: The export format, for messages.

    Raises:
        CheckpointError: The state file lacks the settings.
        MismatchError: The optimizer is not AdamW.
    """
    where = checkpoint.path / STATE
    optimizer = checkpoint.state.get("optimizer")
    name = optimizer.get("name") if isinstance(optimizer, Mapping) else None
    if name not in (None, "AdamW"):
        raise MismatchError(
            f"Only AdamW state can be exported to {to}",
            where=where,
            expected="AdamW",
            found=name,
            fix="Save with checkpoint.no_save_optim=true, or export the weights to another format.",
        )
    _, adam = saved_schedule(checkpoint.state, OptimizerSection(), where=where)
    with reading_state("learning rate", where):
        lr = finite_number(checkpoint.state.get("lr"))
    betas = (adam.adam_beta1, adam.adam_beta2)
    frozen = saved_frozen(checkpoint.state, config)
    return SavedAdam(lr, betas, adam.adam_eps, adam.weight_decay, no_decay_names(config), frozen)


@dataclass(frozen=True, slots=True)
class _State:
    """Arguments for `dcp.save`: tensors on `meta`, and each tensor's source name by its key."""

    nested: dict[str, Any]
    names: dict[str, str]
    total_bytes: int


def _state(config: ModelConfig, adam: SavedAdam | None, counters: Mapping[str, int]) -> _State:
    stored, alias_of = stored_tensors(config), aliases(config)
    names = {f"model.{name}": name for name in stored} | {f"model.{name}": origin for name, origin in alias_of.items()}
    model = {name: _empty(stored[alias_of.get(name, name)].shape) for name in (*stored, *alias_of)}
    nested: dict[str, Any] = {"model": model}
    total_bytes = sum(tensor.nbytes for tensor in model.values())
    if adam is not None:
        state = dict[str, dict[str, torch.Tensor]]()
        trained = {name: tensor for name, tensor in stored.items() if name not in adam.frozen}
        for name, tensor in trained.items():
            state[name] = {STEP: _empty(()), **{kind: _empty(tensor.shape) for kind in MOMENTS}}
            names |= {f"optim.state.{name}.{kind}": f"{kind}.{name}" for kind in state[name]}
        groups = adam_groups(list(trained), adam)
        flat = {f"param_groups.{n}.{k}": v for g in groups for n in g["params"] for k, v in g.items() if k != "params"}
        nested["optim"] = {"state": state, "param_groups": groups, **flat}
        total_bytes += sum(tensor.nbytes for kinds in state.values() for tensor in kinds.values())
    return _State(nested | {name: torch.tensor(value) for name, value in counters.items()}, names, total_bytes)


def _empty(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def adam_groups(names: list[str], adam: SavedAdam) -> list[dict[str, Any]]:
    """Return our two parameter groups, with every setting in the installed torch's AdamW.

    A torch scheduler adds `initial_lr` to a group. With a scheduler, loading requires it. Otherwise loading ignores it.
    """
    settings = dict(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(()))]).param_groups[0])
    settings |= {"lr": adam.lr, "betas": adam.betas, "eps": adam.eps, "initial_lr": adam.lr}
    decays = [name for name in names if name not in adam.no_decay]
    exempt = [name for name in names if name in adam.no_decay]
    return [
        {**settings, "weight_decay": decay, "params": members}
        for decay, members in ((adam.weight_decay, decays), (0.0, exempt))
    ]
