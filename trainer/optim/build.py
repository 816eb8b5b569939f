"""Builds a run's optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from models.config import ModelConfig
from trainer.config.optimizer import OptimizerName, OptimizerSection
from trainer.optim.adamw import build_adamw
from trainer.optim.table import no_decay_names


def build_optimizer(
    config: ModelConfig,
    model: nn.Module,
    section: OptimizerSection,
    memory: Mapping[str, torch.Tensor] | None = None,
    *,
    is_invariant: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer for a model stage, with its full state from the start.

    Args:
        memory: Zeros for the state's local part, by `<key>.<name>`. State without an entry gets new memory.
        is_invariant: Whether a step has the same bits however the parameters are sharded over ranks.
    """
    if section.name is OptimizerName.muon:
        from trainer.optim.muon import build_muon

        return build_muon(config, model, section, memory or {}, is_invariant=is_invariant)
    return build_adamw(model, section, no_decay_names(config), memory, is_invariant=is_invariant)
