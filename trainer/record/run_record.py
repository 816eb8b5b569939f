"""Writes and reads the contents of `trainer_state.json`. Pure."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from enum import Enum
from typing import Any

from models.adapters import adapter_problems
from models.config import ADDED, Activation, Family, LoraConfig, ModelConfig, RopeScaling
from models.families import problems
from reprise.errors import CheckpointError
from reprise.storage import Json, finite_number, integer
from trainer.config.dtype import Dtype
from trainer.config.frozen import frozen_names
from trainer.config.optimizer import OptimizerSection
from trainer.config.parallel import INVARIANT
from trainer.config.schema import Config
from trainer.data.position_map import SKIPPED
from trainer.optim.table import OPTIMIZERS, optimizer_record, settings_record
from trainer.parallel.topology import Topology
from trainer.record.data_origin import reading_state
from trainer.schedules.lr import COUNTS, DecayStyle, Schedule
from trainer.schedules.progress import Progress


def model_record(config: ModelConfig) -> Json:
    """Return every model field as JSON. A field added after the first format is absent while it has its default.

    So a missing activation means the tanh GELU, and a model without `lora` has no adapters.
    """
    table = {name: value.value if isinstance(value, Enum) else value for name, value in asdict(config).items()}
    for field in fields(config):
        if field.metadata.get(ADDED) and getattr(config, field.name) == field.default:
            del table[field.name]
    if not config.is_adapted:
        del table["lora"]
    return table


def describe(config: Config, *, schedule: Schedule, topology: Topology, data: Json, environment: Json) -> Json:
    """Return the constant part of a run's record.

    Args:
        data: The data's record.
    """
    train = config.train
    frozen, sizes = config.frozen, train.batch_sizes
    skipped = train.position_map.record()
    extras = {"ema_decay": train.ema_decay, SKIPPED: skipped, "freeze": list(train.freeze)}
    return {
        "model": model_record(config.model),
        "topology": {
            **{name: getattr(topology, name) for name in ("world_size", "tp", "pp", "vpp", "sp", "dp")},
            "zero_stage": config.parallel.zero_stage,
            **({"replicate": topology.replicate} if topology.replicate > 1 else {}),
            **{key: getattr(config.parallel, key) for key in INVARIANT if getattr(config.parallel, key)},
        },
        "batch": {
            **{name: getattr(train, name) for name in ("global_batch_size", "seq_length", "micro_batch_size")},
            **({"batch_schedule": str(sizes)} if len(sizes.sizes) > 1 else {}),
        },
        "data": data,
        "evaluation": {
            "eval_interval": train.eval_interval,
            **({"eval_iters": train.eval_iters} if train.eval_interval else {}),
        },
        "clip_grad": train.clip_grad,
        "seed": train.seed,
        "schedule": schedule.record(),
        **settings_record(config.optimizer),
        "optimizer": optimizer_record(config.model, config.optimizer, frozen),
        **{name: value for name, value in extras.items() if value},
        "precision": {"dtype": train.dtype.value},
        "environment": environment,
    }


def saved_progress(state: Json, *, seq_length: int, where: object) -> Progress:
    """Return the progress in a state file. If `seq_length` differs, the position is converted through tokens.

    Raises:
        CheckpointError: The progress is missing or impossible.
    """
    with reading_state("progress", where):
        saved = Progress.from_record(state)
        saved_length = integer(state["batch"]["seq_length"])
    if saved_length == seq_length:
        return saved
    return replace(saved, consumed_samples=saved.consumed_tokens // seq_length, valid_loss=None)


def saved_model(state: Json, *, where: object) -> ModelConfig:
    """Return the model in a state file.

    Raises:
        CheckpointError: The model is missing or cannot be built.
    """
    with reading_state("model", where):
        values: dict[str, Any] = dict(state["model"])
        scaling = values.pop("rope_scaling")
        values["family"] = Family(values["family"])
        values["activation"] = Activation(values.get("activation", Activation.gelu_tanh.value))
        lora: dict[str, Any] = dict(values.pop("lora", {}))
        scaling = None if scaling is None else RopeScaling(**scaling)
        model = ModelConfig(**values, rope_scaling=scaling, lora=LoraConfig(**lora))
        reasons = problems(model) or adapter_problems(model)
    if reasons:
        raise CheckpointError("A state file has a model that cannot be built", where=where, found="; ".join(reasons))
    return model


def saved_frozen(state: Json, model: ModelConfig) -> frozenset[str]:
    """Return the stored names of parameters frozen when a state file was written."""
    patterns = state.get("freeze", [])
    return frozen_names(model, patterns) if patterns else frozenset()


def saved_moments(state: Json, *, where: object) -> Dtype:
    """Return the dtype of a checkpoint's moments.

    Raises:
        CheckpointError: The state file names an unknown dtype.
    """
    with reading_state("dtype for moments", where):
        return Dtype(state.get("optimizer", {}).get("moments_dtype", Dtype.float32))


def saved_schedule(state: Json, section: OptimizerSection, *, where: object) -> tuple[Schedule, OptimizerSection]:
    """Return a state file's learning-rate schedule, and `section` with its optimizer settings.

    Raises:
        CheckpointError: A value is missing or not a valid number.
    """
    with reading_state("schedule", where):
        values = state["schedule"]
        unit = "samples" if "decay_samples" in values else "iters"
        if values.keys() != {"style", "lr", "min_lr", *(f"{name}_{unit}" for name in COUNTS)}:
            raise ValueError(f"a schedule of {sorted(values)}")
        counts = {name: integer(values[f"{name}_{unit}"]) for name in COUNTS}
        style = DecayStyle(values["style"])
        schedule = Schedule(
            style=style,
            lr=finite_number(values["lr"], least=0),
            min_lr=finite_number(values["min_lr"], least=0),
            **counts,
            is_in_samples=unit == "samples",
        )
        return schedule, replace(section, **_saved_settings(state, section))


def _saved_settings(state: Json, section: OptimizerSection) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, keys in OPTIMIZERS[section.name].numbers.items():
        table = state[name]
        for member, key in keys.items():
            value, kind = table[member], type(getattr(section, key))
            if kind is bool and not isinstance(value, bool):
                raise TypeError(f"{value!r} is not true or false")
            if kind is not bool:
                value = integer(value) if kind is int else finite_number(value, least=0)
            settings[key] = value
    return settings
