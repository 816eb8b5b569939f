"""A run's checkpoint to export: its tensors, counts, schedule and optimizer settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from models.families import stored_tensors
from reprise.errors import MismatchError
from reprise.format import STATE
from reprise.loading import Checkpoint
from reprise.storage import finite_number
from trainer.config.optimizer import OptimizerSection
from trainer.interop.source import StateSource, of_checkpoint
from trainer.optim.table import no_decay_names
from trainer.record.data_origin import reading_state
from trainer.record.run_record import saved_frozen, saved_schedule
from trainer.schedules.lr import Schedule
from trainer.schedules.progress import Progress


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A checkpoint and its state file's content.

    Args:
        counters: The iteration, and the consumed sample and token counts.
        groups: Two parameter groups, with and without weight decay, each with every setting in the installed torch's
            AdamW. `params` are names.
        trained: The names in both groups, in file order. Empty without optimizer state.
    """

    source: StateSource
    counters: Mapping[str, int]
    schedule: Schedule
    groups: Sequence[Mapping[str, Any]]
    trained: Sequence[str]


def saved_run(checkpoint: Checkpoint, *, to: str) -> SavedRun:
    """Return a checkpoint as an export to another program reads it.

    Args:
        to: The program, for messages.

    Raises:
        CheckpointError: The state file lacks counts or settings.
        MismatchError: The optimizer is not AdamW, or the checkpoint holds adapters alone.
    """
    source, state, where = of_checkpoint(checkpoint), checkpoint.state, checkpoint.path / STATE
    optimizer = state.get("optimizer")
    name = optimizer.get("name") if isinstance(optimizer, Mapping) else None
    if source.has_optimizer and name not in (None, "AdamW"):
        raise MismatchError(
            f"Only AdamW state can be exported to {to}",
            where=where,
            expected="AdamW",
            found=name,
            fix="Save with checkpoint.no_save_optim=true, or export the weights to another format.",
        )
    with reading_state("progress", where):
        progress = Progress.from_record(state)
    counters = {name: getattr(progress, name) for name in ("iteration", "consumed_samples", "consumed_tokens")}
    schedule, adam = saved_schedule(state, OptimizerSection(), where=where)
    with reading_state("learning rate", where):
        lr = finite_number(state.get("lr"))
    # A torch scheduler adds `initial_lr` to a group. With a scheduler, loading requires it, and otherwise ignores it.
    settings = dict(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(()))]).param_groups[0])
    settings |= {"lr": lr, "betas": (adam.adam_beta1, adam.adam_beta2), "eps": adam.adam_eps, "initial_lr": lr}
    frozen, no_decay = saved_frozen(state, source.model), no_decay_names(source.model)
    trained = [name for name in stored_tensors(source.model) if source.has_optimizer and name not in frozen]
    groups = [
        {**settings, "weight_decay": decay, "params": [name for name in trained if (name in no_decay) is is_exempt]}
        for decay, is_exempt in ((adam.weight_decay, False), (0.0, True))
    ]
    return SavedRun(source, counters, schedule, groups, trained)
