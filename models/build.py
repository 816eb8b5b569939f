"""Builds the network of any family, and the interface that all of them have."""

from importlib import import_module

import torch

from models.config import ModelConfig, Stage
from models.families import problems, spec_of
from models.network import Model


def build_model(
    config: ModelConfig, *, stage: Stage | None = None, compute_dtype: torch.dtype = torch.float32
) -> Model:
    """Build a model, or one stage of it, on torch's current default device with float32 parameters.

    The values are those that the memory held: fill them by `initial_values` or from a checkpoint, padding rows with
    zeros.

    Raises:
        ValueError: no model of these sizes can be built; the message lists every reason.
    """
    if found := problems(config):
        raise ValueError("impossible model:\n" + "\n".join(f"  {problem}" for problem in found))
    module, name = spec_of(config).network
    network: type[Model] = getattr(import_module(module), name)
    return network(config, stage or Stage.whole(config.n_layer), compute_dtype)
