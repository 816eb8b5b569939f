"""Writes a checkpoint for transformers' Trainer and its `resume_from_checkpoint`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from reprise.errors import MismatchError
from reprise.format import STATE
from reprise.loading import Checkpoint
from reprise.storage import Json, json_file
from trainer.config.load_saved import config_document
from trainer.config.saved import flattened
from trainer.interop.dcp.streaming import sync_folder
from trainer.interop.formats import ExportOptions
from trainer.interop.hf.convert import fill_folder
from trainer.interop.hf.trainer_settings import ARGUMENTS, STYLES
from trainer.interop.new_output import new_output
from trainer.interop.saved_run import SavedRun, saved_run
from trainer.interop.source import MOMENTS, STEP
from trainer.schedules.lr import DecayStyle

_log = logging.getLogger(__name__)

_TYPES = {style: name for name, style in STYLES.items()}  # the last name, which has all of a style's options


def write(checkpoint: Checkpoint, out: Path, options: ExportOptions) -> None:
    """Write a `checkpoint-N`, and log the arguments with which a Trainer continues like the run.

    All moments are in memory at once.

    Raises:
        CheckpointError: `out` exists, the checkpoint is damaged, a number is beyond the dtype, or the file system
            fails.
        MismatchError: The checkpoint has no AdamW state, or its schedule counts samples.
    """
    run, where = saved_run(checkpoint, to="the Trainer"), checkpoint.path / STATE
    source, schedule = run.source, run.schedule
    if not source.has_optimizer:
        raise MismatchError(
            "A weights-only checkpoint cannot be resumed",
            where=checkpoint.path,
            fix="Export it as `hf`, and start a Trainer with these weights.",
        )
    if schedule.is_in_samples:
        raise MismatchError("The Trainer has no schedule over samples", where=where, fix="Export it as `dcp` or `hf`.")
    step, settings = source.iteration, flattened(config_document(checkpoint))
    rate, batch = schedule.at(step + 1, 0), checkpoint.state["batch"]["global_batch_size"]
    scheduler = {
        "base_lrs": [schedule.lr] * 2,
        "last_epoch": step,
        "_step_count": step + 1,
        "_last_lr": [rate] * 2,
        "lr_lambdas": [None] * 2,
    }
    state = {
        "global_step": step,
        "train_batch_size": batch,
        "logging_steps": settings.get("config.logging.log_interval", 1),
        "save_steps": settings.get("config.checkpoint.save_interval", 500),
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},
    }
    files = options.files
    with new_output(out, files) as partial:
        fill_folder(partial, source, options)
        for name, value in (("optimizer.pt", _optimizer(run, rate)), ("scheduler.pt", scheduler)):
            with (partial / name).open("wb") as file:  # whose errors are the file system's
                torch.save(value, file)
        files.write_whole(partial / STATE, json_file.to_bytes(state))
        sync_folder(files, partial)
    arguments = {name: value for name, value in _arguments(run, checkpoint.state).items() if value is not None}
    _log.info(f"go on with {batch} samples a step and TrainingArguments(OUTPUT_DIR, **{arguments})")


def _optimizer(run: SavedRun, rate: float) -> dict[str, Any]:
    """Return the `state_dict` of the Trainer's AdamW: two groups, with parameters by number."""
    names = [name for group in run.groups for name in group["params"]]
    entries = [{kind: run.source.read(f"{kind}.{name}").float() for kind in (STEP, *MOMENTS)} for name in names]
    settings = {"lr": rate, "initial_lr": run.schedule.lr, "fused": True}
    groups = [{**group, **settings, "params": [*map(names.index, group["params"])]} for group in run.groups]
    return {"state": dict(enumerate(entries)), "param_groups": groups}


def _arguments(run: SavedRun, state: Json) -> dict[str, object]:
    """Return the Trainer's arguments for this run, None for its default. It numbers its learning rates from 0."""
    schedule, group = run.schedule, run.groups[0]
    style, lowest = schedule.style, schedule.min_lr
    kind = None if style is DecayStyle.linear and lowest else _TYPES.get(style)
    if kind is None:
        _log.warning(f"the Trainer has no schedule like {schedule.record()}: pass it your own scheduler")
    values = schedule.lr, group["weight_decay"], *group["betas"], group["eps"], state.get("clip_grad") or 0.0
    return {
        **dict(zip(ARGUMENTS.values(), values, strict=True)),
        "lr_scheduler_type": kind,
        "lr_scheduler_kwargs": {"min_lr": lowest} if style is DecayStyle.cosine else None,
        "warmup_steps": max(0, schedule.warmup - 1),
        "max_steps": schedule.decay - 1,
        "bf16": state.get("precision", {}).get("dtype") == "bfloat16" or None,
    }
