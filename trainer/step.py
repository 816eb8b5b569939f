"""One training iteration: gradients of a global batch, their norm, one optimizer step. Nothing is saved or logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from models import Model, token_loss
from trainer.launch import Cluster
from trainer.optim import clip_gradients, set_learning_rate, squared_norm
from trainer.parallel.data import average_gradients, set_gradient_sync
from trainer.state import TrainerState


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What every iteration of a run needs to know; `mesh` is the data-parallel axis, None where it has size 1."""

    clip_grad: float
    zero_stage: int
    mesh: DeviceMesh | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Mean loss over the global batch and the gradient norm before clipping, the same bits on every rank."""

    loss: float
    grad_norm: float


def train_step(
    state: TrainerState,
    micro_batches: Sequence[torch.Tensor],
    *,
    keys: Sequence[int],
    lr: float,
    settings: StepSettings,
    cluster: Cluster,
) -> StepResult:
    """Run one iteration on this rank's micro batches and step the optimizer. A collective call.

    Args:
        micro_batches: int64 windows [micro_batch_size, seq_length + 1] on the device.
        keys: the dropout key of each micro batch.
    """
    state.optimizer.zero_grad(set_to_none=True)
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    loss = _forward_backward(state.model, micro_batches, keys, settings.zero_stage)
    if settings.mesh is not None and settings.zero_stage == 0:
        average_gradients(parameters, settings.mesh)
    own_norm = squared_norm(parameters)
    is_replica = settings.zero_stage == 0 and cluster.rank > 0  # replicas count once
    rows = cluster.gather([float(loss), 0.0 if is_replica else float(own_norm)])
    mean_loss = sum(row[0] for row in rows) / len(rows)
    grad_norm = math.sqrt(sum(row[1] for row in rows))
    clip_gradients(parameters, grad_norm, settings.clip_grad)
    set_learning_rate(state.optimizer, lr)
    state.optimizer.step()
    return StepResult(mean_loss, grad_norm)


def _forward_backward(
    model: Model, micro_batches: Sequence[torch.Tensor], keys: Sequence[int], zero_stage: int
) -> torch.Tensor:
    """Accumulate the gradients of the mean loss over the micro batches; return that mean, 0-d float64."""
    total = torch.zeros((), dtype=torch.float64, device=micro_batches[0].device)
    for number, (windows, key) in enumerate(zip(micro_batches, keys, strict=True), start=1):
        set_gradient_sync(model, zero_stage=zero_stage, is_last_micro_batch=number == len(micro_batches))
        loss = token_loss(model(windows[:, :-1], dropout_key=key), windows[:, 1:]) / len(micro_batches)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total
