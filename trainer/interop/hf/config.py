"""Reads a model from transformers' `config.json`. Without torch."""

from __future__ import annotations

from pathlib import Path

from models import families
from models.config import ModelConfig
from reprise.errors import MismatchError
from reprise.format import MANIFEST
from reprise.storage import Json, exists, is_file, is_iteration_name, json_file, shown

CONFIG, _GENERATION = "config.json", "generation_config.json"


def is_folder(path: Path) -> bool:
    """Return whether a path is a transformers model folder, and not our checkpoint or run."""
    is_ours = exists(path / MANIFEST) or is_iteration_name(path.name)
    return not is_ours and is_file(path / CONFIG)


def read_folder_model(path: Path) -> tuple[ModelConfig, list[str]]:
    """Return the model described by a folder's JSON files, and log lines on settings that are not carried over.

    A missing token id is replaced by an id in the vocabulary.

    Raises:
        MismatchError: The model is not supported. The error lists unsupported fields and invalid values.
        CheckpointError: A file is malformed.
    """
    table, beside = json_file.read(path / CONFIG), path / _GENERATION
    generation = json_file.read(beside) if is_file(beside) else None
    model = _model(table, generation, where=path / CONFIG)
    lost = [f"{name}={shown(value)}" for name, value in families.spec_of(model).hf.lost(table, model).items()]
    return model, [f"not carried from {path / CONFIG}: {', '.join(lost)}"] if lost else []


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
