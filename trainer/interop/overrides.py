"""The command-line overrides to configure a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from models.config import ModelConfig
from models.families import spec_of
from trainer.config.overrides import text_value
from trainer.record.run_record import model_record


def model_overrides(model: ModelConfig, overrides: Sequence[str] = ()) -> list[str]:
    """Return overrides to configure `model`, to stand before `overrides`; none if those choose a model themselves."""
    if any(override.startswith("model=") for override in overrides):
        return []
    fields = {name: value for name, value in model_record(model).items() if name != "family"}
    # Every field is overridden, but an override cannot give rope_scaling to a group that has none.
    group = f"{model.family.value}_tiny" if model.rope_scaling is None else spec_of(model).scaled_preset
    return [f"model={group}", *(f"model.{name}={_text(value)}" for name, value in fields.items())]


def _text(value: object) -> str:
    """Return a value in the grammar of overrides (https://hydra.cc/docs/advanced/override_grammar/basic/)."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_text(member)}" for name, member in value.items()) + "}"
    if isinstance(value, str):
        return text_value(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
