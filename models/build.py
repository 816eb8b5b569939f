"""Builds the network of any family."""

from importlib import import_module

import torch

from models.config import ModelConfig, Stage
from models.families import problems, spec_of
from models.network import Model


def build_model(
    config: ModelConfig, *, stage: Stage | None = None, compute_dtype: torch.dtype = torch.float32
) -> Model:
    """Build a model, or a stage of it, on torch's current default device with float32 parameters.

    The memory is uninitialized: fill it by `initial_values` or from a checkpoint, padding rows with zeros.

    Raises:
        ValueError: no model of these sizes can be built; the message lists every reason.
    """
    if reasons := problems(config):
        raise ValueError("impossible model:\n" + "\n".join(f"  {problem}" for problem in reasons))
    module, name = spec_of(config).network
    network: type[Model] = getattr(import_module(module), name)
    return network(config, stage or Stage.whole(config.n_layer), compute_dtype)
