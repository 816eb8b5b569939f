"""Muon for the blocks' matrices and AdamW for all other parameters, as a single optimizer.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
Scalable for LLM Training"; `torch.optim.Muon`, which gives the same bits on one rank. Torch's class supports neither
three-dimensional fused weights nor shards: only a whole matrix can be orthogonalized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any, cast

import torch
from torch import nn

from models.config import ModelConfig
from models.families import block_matrices
from reprise.tensors import Grid, is_dtensor, local_of, parameter_names, placed_box, with_memory
from reprise.torch_private import _zeropower_via_newtonschulz
from trainer.config.optimizer import OptimizerSection
from trainer.optim.adamw import EagerOptimizer, build_adamw, moments_dtype, zeros_for
from trainer.optim.table import no_decay_names, settings_record

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al.: the steepest slope at zero
_EPS = 1e-7


def build_muon(
    config: ModelConfig,
    model: nn.Module,
    section: OptimizerSection,
    memory: Mapping[str, torch.Tensor],
    *,
    is_invariant: bool,
) -> torch.optim.Optimizer:
    """Return Muon for a model stage, with AdamW for its other parameters, see `build_optimizer`."""
    matrices, no_decay = block_matrices(config), no_decay_names(config)
    adamw = build_adamw(model, section, no_decay, memory, without=matrices, is_invariant=is_invariant)
    names = {p: name for p, name in parameter_names(model).items() if p.requires_grad and name in matrices}
    group = {"params": list(names), "weight_decay": section.weight_decay, **settings_record(section)["muon"]}
    optimizer = Muon(group, adamw, lr=section.lr)
    for parameter, name in names.items():
        zeros = zeros_for(parameter, memory.get(f"momentum_buffer.{name}"), moments_dtype(section))
        optimizer.state[parameter] = {"momentum_buffer": zeros}
    return optimizer


class Muon(EagerOptimizer):
    """Steps a group of matrices by their orthogonalized momentum, and the groups of `adamw` by AdamW.

    A sharded parameter is gathered for its update, and every rank keeps its own part. All ranks compute the same whole
    matrix in the same order, so a step has the same bits on each. A fused weight is a single matrix, as stored: GPT-2's
    query, key and value together, [n_embd, 3 n_embd].
    """

    def __init__(self, group: dict[str, Any], adamw: torch.optim.AdamW, *, lr: float) -> None:
        super().__init__([group], {"lr": lr})
        self._adamw = adamw
        self.param_groups += adamw.param_groups  # the same objects: a learning rate set here applies there
        self.state.update(adamw.state)
        adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all parameters with a gradient. A collective call if parameters are sharded."""
        group = self.param_groups[0]
        for parameter in group["params"]:
            if parameter.grad is not None:
                _step_matrix(parameter, self.state[parameter]["momentum_buffer"], group)
        self._adamw.step()


def _step_matrix(parameter: nn.Parameter, momentum_buffer: torch.Tensor, group: Mapping[str, Any]) -> None:
    assert parameter.grad is not None
    weight, gradient, buffer = local_of(parameter), local_of(parameter.grad), local_of(momentum_buffer)
    momentum = buffer.float()  # the tensor itself unless it is bfloat16
    momentum.lerp_(gradient, 1 - group["momentum"])
    buffer.copy_(momentum)
    full = _gather(parameter, gradient.lerp(momentum, group["momentum"]))
    matrix = full.flatten(1)
    update = _own_part(parameter, orthogonalized(matrix, group["ns_steps"]).reshape(full.shape))
    rows, columns = matrix.shape
    scale = 0.2 * sqrt(max(rows, columns)) if group["match_rms_adamw"] else sqrt(max(1, rows / columns))
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(update, alpha=-group["lr"] * scale)


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return a float32 matrix with the same singular vectors and singular values near 1, in bfloat16."""
    return _zeropower_via_newtonschulz(matrix, _NEWTON_SCHULZ, steps, _EPS)


def _gather(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """Gather a full tensor from shards placed like a parameter's."""
    full = with_memory(parameter, local)
    return cast(torch.Tensor, full.full_tensor()) if is_dtensor(full) else full  # type: ignore[attr-defined]


def _own_part(parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor."""
    if not is_dtensor(parameter):
        return full
    box, _ = placed_box("", parameter, Grid.flat(1))
    return full[tuple(slice(lo, hi) for lo, hi in zip(box.offset, box.end, strict=True))]
