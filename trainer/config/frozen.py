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
    names, frozen = list(stored_tensors(model)), set[str]()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            yield f"train.freeze: {pattern!r} matches no parameter; a valid name is {names[0]}"
        frozen.update(matching)
    if len(frozen) == len(names):
        yield "train.freeze: matches every parameter, so nothing would be trained"
