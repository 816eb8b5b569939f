"""Reads a model from transformers' `config.json`, and compares it with the configured model. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from models import families
from models.config import ModelConfig
from models.hf_config import lost_generation
from reprise.errors import MismatchError
from reprise.format import MANIFEST
from reprise.storage import Json, exists, is_file, is_iteration_name, json_file, shown

CONFIG, _GENERATION = "config.json", "generation_config.json"
# Fields that affect neither tensors nor results. A difference is logged.
_FREE = ("dropout", "initializer_range", "bos_token_id", "eos_token_id", "stop_token_ids")


def is_folder(path: Path) -> bool:
    """Return whether a path is a transformers model folder, and not our checkpoint or run."""
    is_ours = exists(path / MANIFEST) or is_iteration_name(path.name)
    return not is_ours and is_file(path / CONFIG)


def read_folder_model(path: Path) -> tuple[ModelConfig, list[str]]:
    """Return the model described by a folder's JSON files, and a log line per file with settings not carried over.

    A missing token id is replaced by an id in the vocabulary.

    Raises:
        MismatchError: The model is not supported. The error lists unsupported fields and invalid values.
        CheckpointError: A file is malformed.
    """
    table, beside = json_file.read(path / CONFIG), path / _GENERATION
    generation = json_file.read(beside) if is_file(beside) else None
    model = _model(table, generation, where=path / CONFIG)
    spec, document = families.spec_of(model), families.hf_config(model)
    lost = {CONFIG: spec.hf.lost(table, generation, model)}
    if generation is not None:
        lost[_GENERATION] = lost_generation(generation, model)
    return model, [
        f"not carried from {path / name}: "
        + ", ".join(_lost(member, value, document) for member, value in members.items())
        for name, members in lost.items()
        if members
    ]


def _model(table: Json, generation: Json | None, *, where: object) -> ModelConfig:
    family = families.family_of_type(table.get("model_type"))
    if family is None:
        supported = [spec.hf.model_type for spec in families.FAMILIES.values()]
        raise MismatchError(
            "The folder holds a model of an unsupported family",
            where=where,
            expected=f"{', '.join(supported[:-1])} or {supported[-1]}",
            found=shown(table.get("model_type")),
        )
    problems: list[str] = []
    spec = families.FAMILIES[family]
    values = spec.hf.read(table, generation, problems)
    if not problems:
        follows = {name: values[origin] for name, origin in spec.follows.items()}
        model = ModelConfig(**{"family": family, **values, **follows})
        problems = families.problems(model)
        if not problems:
            return model
    raise MismatchError(
        "The folder holds an unsupported model",
        where=where,
        found="these unsupported settings:\n" + "\n".join(f"  {problem}" for problem in problems),
    )


def _lost(name: str, value: object, document: Json) -> str:
    return f"{name}={shown(value)}" + (f" ({shown(document[name])} here)" if name in document else "")


def require_layers(model: ModelConfig, tensors: int, *, where: object) -> None:
    """Refuse a model with more layers than tensors, before listing its tensors.

    Raises:
        MismatchError: There are too few tensors. The error has both counts.
    """
    if model.n_layer > tensors:
        raise MismatchError("There are fewer tensors than layers", where=where, expected=model.n_layer, found=tensors)


def differences(stored: ModelConfig, configured: ModelConfig, *, where: object, kind: str = "folder") -> list[str]:
    """Return a line for each accepted difference.

    Args:
        kind: `folder` or the file's noun, for messages. Only a folder has its own field names.

    Raises:
        MismatchError: There are other differences. The error lists them with both values and the setting to change.
    """
    if stored.family is not configured.family:
        raise MismatchError(
            f"The {kind} holds a model of a different family",
            where=where,
            expected=f"model.family={configured.family.value}",
            found=stored.family.value + (" (model_type)" if kind == "folder" else ""),
            fix="Set model=NAME to a model of that family.",
        )
    spec = families.spec_of(configured)
    fields = spec.hf.names() if kind == "folder" else {}
    accepted, refused = [], []
    before, after = (asdict(model) | {"activation": model.activation.value} for model in (stored, configured))
    for name in after:
        if name in ("family", "pad_vocab_multiple") or before[name] == after[name]:
            continue
        if name == "vocab_size" and before[name] == configured.padded_vocab_size:
            accepted.append(
                f"rows {configured.vocab_size} to {stored.vocab_size} of the vocabulary are padding, left out"
            )
        elif name in _FREE:
            accepted.append(f"model.{name}: {before[name]} there, {after[name]} here")
        elif name not in spec.follows:
            origin = f" ({fields[name]})" if fields.get(name, name) != name else ""
            refused.append(
                f"  model.{name}: {before[name]} there{origin}, {after[name]} here  ({_setting(name, before, after)})"
            )
    if refused:
        raise MismatchError(
            f"The {kind} does not hold the configured model",
            where=where,
            found="these differences:\n" + "\n".join(refused),
            fix=f"\nSet the keys in parentheses, or set checkpoint.load to another {kind}.",
        )
    return accepted


def _setting(name: str, stored: Mapping[str, object], configured: Mapping[str, object]) -> str:
    value = stored[name]
    if isinstance(value, Mapping):
        members = ",".join(f"{key}:{member}" for key, member in value.items())
        begin = "" if configured[name] is not None else "on a model= that has one, such as llama3_1b, "
        return f"{begin}'model.{name}={{{members}}}' sets it"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"model.{name}={text} sets it"
