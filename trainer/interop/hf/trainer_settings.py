"""Reads the settings and log in a transformers Trainer checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reprise.format import STATE
from reprise.storage import Json, finite_number, integer, is_file, json_file, shown
from trainer.interop.formats import few
from trainer.interop.numbered import Table
from trainer.interop.source import StateSource
from trainer.interop.torch_file import attributes_of, read_torch_file
from trainer.schedules.lr import DecayStyle, Schedule

_log = logging.getLogger(__name__)

_SCHEDULERS = "scheduler.pt", "scheduler.bin"
STYLES = {
    "linear": DecayStyle.linear,
    "cosine": DecayStyle.cosine,
    "cosine_with_min_lr": DecayStyle.cosine,
    "constant": DecayStyle.constant,
    "constant_with_warmup": DecayStyle.constant,
}
# The keys here, and the Trainer's arguments. A parameter group has all but the last.
ARGUMENTS = {
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.adam_beta1": "adam_beta1",
    "optimizer.adam_beta2": "adam_beta2",
    "optimizer.adam_eps": "adam_epsilon",
    "train.clip_grad": "max_grad_norm",
}
# The figures in a log entry, and their names here.
_FIGURES = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "eval_loss": "valid_loss"}
# Arguments that change the losses and have no counterpart here.
_LOST = ("fp16", "label_smoothing_factor", "neftune_noise_alpha")


def with_settings(source: StateSource, path: Path, groups: Sequence[Table]) -> StateSource:
    """Return a source with the iteration, settings and log found in its folder.

    Args:
        groups: The optimizer's parameter groups. Empty if they are not numbered.
    """
    # The Trainer writes NaN for gradient norms.
    state = json_file.read(path / STATE, constant=lambda _: None) if is_file(path / STATE) else {}
    file = path / "training_args.bin"
    arguments = attributes_of(read_torch_file(file)) if is_file(file) else {}
    scheduler: Table = next((read_torch_file(path / name) for name in _SCHEDULERS if is_file(path / name)), {})
    iteration = integer(state["global_step"]) if state else source.iteration
    settings = _settings(arguments, groups)
    if state.get("max_steps"):
        settings["train.train_iters"] = integer(state["max_steps"])
    if arguments:
        settings |= _batches(arguments, state)
    settings |= _schedule(arguments, scheduler, settings, iteration)
    if lost := [f"{name}={shown(arguments[name])}" for name in _LOST if arguments.get(name)]:
        _log.warning(f"not carried from {path}, and the losses differ: {few(lost)}")
    words = " ".join(f"{key}={value}" for key, value in settings.items())
    _log.info(f"epoch {state.get('epoch')} there, with {words}; not carried over: random generators, sample order")
    batch = settings.get("train.global_batch_size")
    samples, log = batch and iteration * batch, list(_lines(state.get("log_history", ())))
    return replace(source, iteration=iteration, consumed_samples=samples, settings=settings, log=log)


def _settings(arguments: Json, groups: Sequence[Table]) -> dict[str, Any]:
    """Return AdamW's settings and the clipping, as its groups have them, or else the arguments."""
    settings = {key: arguments[name] or 0.0 for key, name in ARGUMENTS.items() if name in arguments}
    for group in sorted(groups, key=lambda group: finite_number(group["weight_decay"]))[-1:]:
        values = group.get("initial_lr", group["lr"]), group["weight_decay"], *group["betas"], group["eps"]
        settings |= zip(ARGUMENTS, values, strict=False)
    if len({group["lr"] for group in groups}) > 1:
        _log.warning("the parameter groups there have different learning rates; here one group's settings are used")
    return {key: finite_number(value) for key, value in settings.items()}


def _schedule(arguments: Json, scheduler: Table, settings: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Return the schedule for coming iterations. Log a warning and return nothing if no schedule here has these rates.

    The Trainer's iteration n + 1 uses the rate after n scheduler steps, starting at 0.
    """
    kind = arguments.get("lr_scheduler_type")
    name = str(getattr(kind, "values", [kind])[-1]).lower()
    options, style, peak = arguments.get("lr_scheduler_kwargs") or {}, STYLES.get(name), settings.get("optimizer.lr")
    if style is None or peak is None or options.keys() - {"min_lr"}:
        _log.warning(f"not carried: the schedule {name} {options or ''}; the command's schedule.* goes on")
        return {}
    end, lowest = settings["train.train_iters"], finite_number(options.get("min_lr", 0))
    # A value below 1, or `warmup_ratio` in older versions, is a fraction of the run.
    steps = finite_number(arguments.get("warmup_steps") or arguments.get("warmup_ratio") or 0, least=0)
    warmup = 0 if name == "constant" else int(steps) if steps >= 1 else math.ceil(end * steps)
    schedule = Schedule(style, peak, lowest, warmup + 1, end + 1, 0)
    rate = schedule.at(iteration + 1, 0)
    last_rate = finite_number(scheduler.get("_last_lr", [rate])[0])
    if iteration < warmup:
        _log.warning(f"the warmup rises from 0 at iteration 0 here, at iteration 1 there: the next rate is {rate}")
    elif not math.isclose(last_rate, rate, rel_tol=1e-6, abs_tol=1e-12):
        _log.warning(f"not carried: the schedule, whose next rate is {last_rate}, where {name} would have {rate}")
        return {}
    return {
        "schedule.lr_decay_style": style.value,
        "schedule.min_lr": lowest,
        "schedule.lr_warmup_iters": schedule.warmup,
        "schedule.lr_decay_iters": schedule.decay,
    }


def _batches(arguments: Json, state: Json) -> dict[str, Any]:
    """Return the batch sizes and the dtype."""
    size = integer(state.get("train_batch_size") or arguments["per_device_train_batch_size"])
    ranks = integer(attributes_of(arguments.get("distributed_state")).get("num_processes", 1))
    axes = attributes_of(arguments.get("parallelism_config"))
    ranks //= math.prod(integer(axes.get(f"{axis}_size") or 1) for axis in ("tp", "cp", "sp"))
    return {
        "train.micro_batch_size": size,
        "train.global_batch_size": size * ranks * integer(arguments["gradient_accumulation_steps"]),
        "train.dtype": "bfloat16" if arguments.get("bf16") else "float32",
    }


def _lines(history: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    """Yield log records. A loss belongs to its iteration if every iteration is logged; otherwise it is a mean."""
    previous = 0
    for entry in history:
        line = {name: entry[key] for key, name in _FIGURES.items() if entry.get(key) is not None}
        line["iteration"] = iteration = integer(entry["step"])
        if "valid_loss" in line:
            yield {**line, "event": "evaluation"}
        elif "loss" in line:
            yield line if iteration == previous + 1 else {**line, "event": "mean"}
            previous = iteration
