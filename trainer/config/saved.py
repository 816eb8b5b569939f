"""A checkpoint's configuration, `run_config.json`: written by a run, and the base for a run that loads it.

It holds only the run's settings. It leaves out a machine's paths for writing and loading, and keys acting on a single
start. It also leaves out the parallel layout, which is `topology` in `trainer_state.json`. So the file has
the same bytes at every topology and in every folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any

from models.config import ModelConfig
from reprise.errors import CheckpointError, MismatchError
from trainer.config.checkpoint import FinetuneKeys, LoadKeys, ResumeKeys
from trainer.config.schema import Config, key_types

Json = dict[str, Any]

RUN_CONFIG = "run_config.json"
FORMAT = "reprise-run-config/1"

# Keys and whole sections left out of a checkpoint.
_EXCLUDED = (
    "run",
    "parallel",
    "experiment",
    "data.cache",
    "data.factory",  # a function called at the start: only a command names it
    "data.position",
    "train.exit_interval",
    "train.exit_duration_in_mins",
    "train.profile_steps",
    "train.dry_run",
    "train.dry_run_ranks",
    "checkpoint.save",
    "checkpoint.local",
    *(f"checkpoint.{field.name}" for keys in (LoadKeys, FinetuneKeys, ResumeKeys) for field in fields(keys)),
)
# Keys of earlier versions, which have no effect any more.
_REMOVED = {
    "data.verify",
    "data.vocab_size",
    "logging.sinks",
    "train.check_replicas_interval",
    "train.ema_offload",
    "train.exit_signal_save_seconds",
    "train.sample_interval",
    "train.sample_prompt",
    "train.sample_tokens",
}
# Values of earlier versions, and what stands for them now.
_REPLACED = {("logging.publish", "tensorboard"): None, ("data.kind", "datatrove"): "megatron"}

# `topology` members in trainer_state.json, and their keys in the `parallel` section.
PARALLEL_KEYS = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "zero_stage": "zero_stage",
    "replicate": "replicate",
    "invariant_ranks": "invariant_ranks",
    "invariant_tensor_ranks": "invariant_tensor_ranks",
}


def model_values(model: ModelConfig) -> dict[str, object]:
    """Return another program's model as values by dotted key, without adapters and padding, which the command sets."""
    names = [field.name for field in fields(model) if field.name not in ("lora", "pad_vocab_multiple")]
    return {f"model.{name}": _plain(getattr(model, name)) for name in names}


def saved_config(config: Config) -> Json:
    """Return a run's settings by section and key, as JSON.

    `schedule.lr_decay_iters`, or `lr_decay_samples` and `lr_warmup_samples`, have their resolved values, so a run with
    another length or other batches keeps the schedule.
    """
    schedule = config.learning_rates
    resolved = replace(config.schedule)
    if schedule.is_in_samples:
        resolved.lr_warmup_samples, resolved.lr_decay_samples = schedule.warmup, schedule.decay
    else:
        resolved.lr_decay_iters = schedule.decay
    config = replace(config, schedule=resolved)
    sections: Json = {}
    for key in _keys():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = _plain(attrgetter(key)(config))
    return sections


def without_keys(document: Json, keys: Collection[str]) -> Json:
    """Return `run_config.json` without these dotted keys."""
    return {**document, "config": _without(document["config"], keys)}


def _without(table: Json, keys: Collection[str], prefix: str = "") -> Json:
    return {
        key: _without(value, keys, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in table.items()
        if f"{prefix}{key}" not in keys
    }


def flattened(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return all values in nested objects by dotted path."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def saved_values(document: Json, state: Json, *, where: object) -> dict[str, object]:
    """Return a checkpoint's configuration values by dotted key, including `parallel`.

    Args:
        document: The content of `run_config.json`.
        state: The content of `trainer_state.json`, which has the parallel layout.
        where: The place to name in errors.

    Raises:
        MismatchError: The format differs, or this version does not know a key.
        CheckpointError: The document is malformed.
    """
    if document.get("format") != FORMAT:
        raise MismatchError(
            "The checkpoint's configuration has an unsupported format version",
            where=where,
            expected=FORMAT,
            found=document.get("format"),
            fix=_OTHER_WAY,
        )
    config = document.get("config")
    if not isinstance(config, dict) or not all(isinstance(section, dict) for section in config.values()):
        raise CheckpointError("The checkpoint's configuration is malformed", where=where, expected="sections of keys")
    values = {f"{name}.{key}": value for name, section in config.items() for key, value in section.items()}
    values = {key: value for key, value in values.items() if key not in _REMOVED}
    for (key, before), now in _REPLACED.items():
        if values.get(key) == before:
            values[key] = now
    unknown = values.keys() - _keys()
    if unknown:
        raise MismatchError(
            "The checkpoint's configuration has a key that this version does not know",
            where=where,
            found=", ".join(sorted(unknown)),
            fix=_OTHER_WAY,
        )
    topology = state.get("topology")
    table = topology if isinstance(topology, dict) else {}
    return values | {f"parallel.{key}": table[name] for name, key in PARALLEL_KEYS.items() if name in table}


_OTHER_WAY = "Set the configuration on the command line with model= or experiment=; this file is then ignored."


def _keys() -> list[str]:
    """Return the dotted key of every setting in a checkpoint."""
    keys = [key for key in key_types() if key.count(".") == 1]
    return [key for key in keys if key not in _EXCLUDED and key.partition(".")[0] not in _EXCLUDED]


def _plain(value: Any) -> Any:
    """Convert a schema value to JSON. An enum becomes its name, as on the command line."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(member) for member in value] if isinstance(value, list) else value
