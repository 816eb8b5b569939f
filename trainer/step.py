"""One training iteration: the gradients of a global batch, their norm, and one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from models.families import aliases, stored_tensors
from trainer.checkpoint.tensors.live import local_of, parameter_names
from trainer.errors import NonFiniteError
from trainer.launch.process_group import Cluster
from trainer.optim import clip_gradients, set_learning_rate, squared_norm
from trainer.parallel.context import ParallelContext
from trainer.parallel.data import average_gradients, set_gradient_sync
from trainer.parallel.pipeline import sum_tied_gradients
from trainer.parallel.tensor import reduce_partial_gradients
from trainer.state import TrainerState


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of an iteration, bit-identical on every rank.

    Args:
        loss: mean over the global batch.
        grad_norm: L2 norm of all gradients before clipping.
        flags: the element-wise maximum of the flags of all ranks.
        skipped: the error that made the iteration leave the parameters unchanged (`skips_nonfinite`), or None.
    """

    loss: float
    grad_norm: float
    flags: tuple[float, ...] = ()
    skipped: NonFiniteError | None = None


def train_step(
    state: TrainerState,
    micro_batches: Sequence[torch.Tensor],
    *,
    keys: Sequence[int],
    lr: float,
    clip_grad: float,
    context: ParallelContext,
    cluster: Cluster,
    flags: Callable[[], Sequence[float]] = tuple,
    skips_nonfinite: bool = False,
) -> StepResult:
    """Run one iteration on this rank's micro batches and step the optimizers. A collective call.

    Args:
        micro_batches: int64 windows [micro_batch_size, seq_length + 1] on the device.
        keys: the dropout key of each micro batch.
        flags: called after the backward pass; returns numbers to reduce over the ranks, equally many on each.
        skips_nonfinite: if loss or gradient norm is not finite, leave the parameters unchanged instead of raising.

    Raises:
        NonFiniteError: on every rank, before any parameter changes, if loss or gradient norm is not finite.
    """
    parameters = list(state.parameters())
    for part in state.parts:
        part.optimizer.zero_grad(set_to_none=True)
    with context.loss_context():
        loss = forward_backward(state, micro_batches, keys, context)
    _finish_gradients(state, parameters, context)
    own = _Figures(float(loss), float(context.reports_loss), float(squared_norm(context.grad_norm_parameters)))
    rows, all_flags = _gather(cluster, own, flags())
    mean_loss = sum(row.loss * row.reports_loss for row in rows) / sum(row.reports_loss for row in rows)
    grad_norm = math.sqrt(sum(row.squared_norm for row in rows))
    agreed = tuple(max(column) for column in zip(*all_flags, strict=True))
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        poisoned = _poisoned(state, mean_loss, grad_norm, cluster)
        if not skips_nonfinite:
            raise poisoned
        return StepResult(mean_loss, grad_norm, agreed, skipped=poisoned)
    clip_gradients(parameters, grad_norm, clip_grad)
    for part in state.parts:
        set_learning_rate(part.optimizer, lr)
        part.optimizer.step()
    return StepResult(mean_loss, grad_norm, agreed)


class _Figures(NamedTuple):
    """One rank's figures of an iteration, gathered from all ranks in one message, followed by the flags.

    `reports_loss` is 1 if the loss counts in the mean, else 0.
    """

    loss: float
    reports_loss: float
    squared_norm: float


def _gather(cluster: Cluster, own: _Figures, flags: Sequence[float]) -> tuple[list[_Figures], list[Sequence[float]]]:
    """Return the figures and the flags of every rank. A collective call."""
    rows = cluster.gather([*own, *flags])
    count = len(own)
    return [_Figures(*row[:count]) for row in rows], [row[count:] for row in rows]


def _poisoned(state: TrainerState, loss: float, grad_norm: float, cluster: Cluster) -> NonFiniteError:
    """Return the error that names the first parameter in model order with a non-finite gradient. A collective call."""
    names = list(stored_tensors(state.config))
    second = aliases(state.config)
    found = [
        names.index(second.get(name, name))
        for part in state.parts
        for parameter, name in parameter_names(part.model).items()
        if parameter.grad is not None and not bool(torch.isfinite(local_of(parameter.grad)).all())
    ]
    first = int(min(row[0] for row in cluster.gather([float(min(found, default=len(names)))])))
    place = f"gradient of {names[first]}" if first < len(names) else "all gradients are finite, their norm is not"
    return NonFiniteError(
        "Loss or gradients are not finite",
        where=f"iteration {state.progress.iteration + 1}, {place}",
        found=f"loss {loss}, gradient norm {grad_norm}",
        fix="Nothing of this iteration was kept or saved. Lower optimizer.lr or fix the data, then resume; "
        "train.on_nonfinite=skip skips such iterations.",
    )


def forward_backward(
    state: TrainerState, micro_batches: Sequence[torch.Tensor], keys: Sequence[int], context: ParallelContext
) -> torch.Tensor:
    """Accumulate the gradients of the mean loss over the micro batches; return that mean, 0-d float64."""
    total = torch.zeros((), dtype=torch.float64, device=micro_batches[0].device)
    if context.pipeline is not None:
        losses = context.pipeline.forward_backward(torch.cat(list(micro_batches)), torch.tensor(keys))
        return sum((loss.double() / len(losses) for loss in losses), total)
    model = state.parts[0].model
    for number, (windows, key) in enumerate(zip(micro_batches, keys, strict=True), start=1):
        set_gradient_sync(model, zero_stage=context.zero_stage, is_last_micro_batch=number == len(micro_batches))
        loss = context.loss(model(windows[:, :-1], dropout_key=key), windows[:, 1:]) / len(micro_batches)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def _finish_gradients(state: TrainerState, parameters: Sequence[nn.Parameter], context: ParallelContext) -> None:
    """Reduce every gradient over the axes on which it is still partial. A collective call."""
    if context.is_tensor_parallel:
        for part in state.parts:
            reduce_partial_gradients(part.model)
    if context.data is not None and context.zero_stage == 0:
        average_gradients(parameters, context.data)
    if context.embedding_group is not None:
        sum_tied_gradients([part.model for part in state.parts], context.embedding_group)
