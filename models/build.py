"""Builds a network for any family."""

from importlib import import_module

import torch

from models.config import ModelConfig, Stage
from models.families import problems, spec_of
from models.network import Model


def build_model(
    config: ModelConfig, *, stage: Stage | None = None, compute_dtype: torch.dtype = torch.float32
) -> Model:
    """Build a model, or a pipeline stage, on torch's default device with float32 parameters.

    The memory is uninitialized: fill it by `initial_values` or from a checkpoint, padding rows with zeros.

    Raises:
        ValueError: A model cannot have these sizes. The message lists every reason.
    """
    if reasons := problems(config):
        raise ValueError("invalid model:\n" + "\n".join(f"  {problem}" for problem in reasons))
    module, name = spec_of(config).network
    network: type[Model] = getattr(import_module(module), name)
    return network(config, stage or Stage.whole(config.n_layer), compute_dtype)
