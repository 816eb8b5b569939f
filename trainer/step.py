"""One training iteration: gradients of a global batch, their norm, one optimizer step. Nothing is saved or logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.axes import Axes
from trainer.launch import Cluster
from trainer.optim import clip_gradients, set_learning_rate, squared_norm
from trainer.parallel.data import average_gradients, set_gradient_sync
from trainer.parallel.pipeline import sum_tied_gradients
from trainer.parallel.tensor import reduce_partial_gradients
from trainer.state import TrainerState


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
    clip_grad: float,
    axes: Axes,
    cluster: Cluster,
) -> StepResult:
    """Run one iteration on this rank's micro batches and step the optimizers. A collective call.

    Args:
        micro_batches: int64 windows [micro_batch_size, seq_length + 1] on the device.
        keys: the dropout key of each micro batch.
    """
    parameters = list(state.parameters())
    for part in state.parts:
        part.optimizer.zero_grad(set_to_none=True)
    with axes.loss_context():
        loss = _forward_backward(state, micro_batches, keys, axes)
    _finish_gradients(state, parameters, axes)
    rows = cluster.gather([float(loss), float(axes.reports_loss), float(squared_norm(axes.counted))])
    mean_loss = sum(row[0] * row[1] for row in rows) / sum(row[1] for row in rows)
    grad_norm = math.sqrt(sum(row[2] for row in rows))
    clip_gradients(parameters, grad_norm, clip_grad)
    for part in state.parts:
        set_learning_rate(part.optimizer, lr)
        part.optimizer.step()
    return StepResult(mean_loss, grad_norm)


def _forward_backward(
    state: TrainerState, micro_batches: Sequence[torch.Tensor], keys: Sequence[int], axes: Axes
) -> torch.Tensor:
    """Accumulate the gradients of the mean loss over the micro batches; return that mean, 0-d float64."""
    total = torch.zeros((), dtype=torch.float64, device=micro_batches[0].device)
    if axes.pipeline is not None:
        losses = axes.pipeline.forward_backward(torch.cat(list(micro_batches)), torch.tensor(keys))
        return sum((loss.double() / len(losses) for loss in losses), total)
    model = state.parts[0].model
    for number, (windows, key) in enumerate(zip(micro_batches, keys, strict=True), start=1):
        set_gradient_sync(model, zero_stage=axes.zero_stage, is_last_micro_batch=number == len(micro_batches))
        loss = axes.loss(model(windows[:, :-1], dropout_key=key), windows[:, 1:]) / len(micro_batches)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def _finish_gradients(state: TrainerState, parameters: Sequence[nn.Parameter], axes: Axes) -> None:
    """Bring every gradient to the sum or mean over all axes that it is to be."""
    if axes.is_tensor_parallel:
        for part in state.parts:
            reduce_partial_gradients(part.model)
    if axes.data is not None and axes.zero_stage == 0:
        average_gradients(parameters, axes.data)
    if axes.ends is not None:
        sum_tied_gradients([part.model for part in state.parts], axes.ends)
