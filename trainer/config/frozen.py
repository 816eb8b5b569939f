"""A run's frozen parameters, by stored name: those in `train.freeze`, or a base. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from models.config import ModelConfig
from models.families import stored_tensors


def frozen_names(model: ModelConfig, patterns: Sequence[str]) -> frozenset[str]:
    """Return the names of frozen stored tensors: those matching a pattern, or all beneath adapters.

    Args:
        patterns: Shell patterns, from `train.freeze`.
    """
    is_base = model.is_adapted
    return frozenset(name for name in stored_tensors(model) if is_base or any(fnmatchcase(name, p) for p in patterns))


def freeze_problems(model: ModelConfig, patterns: Sequence[str]) -> Iterator[str]:
    """List problems with patterns: no match, or a match for every parameter."""
    if model.is_adapted:
        if patterns:
            reason = f"model.lora.rank={model.lora.rank} freezes everything except the adapters; omit the key"
            yield f"train.freeze={list(patterns)}: {reason}"
        return
    stored = stored_tensors(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in stored):
            yield f"train.freeze: {pattern!r} matches no parameter; a valid name is {next(iter(stored))}"
    if len(frozen_names(model, patterns)) == len(stored):
        yield "train.freeze: matches every parameter, so nothing would be trained"
