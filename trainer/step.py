"""One training iteration: gradients of a global batch, their norm, one optimizer step. Nothing is saved or logged."""

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
    """What an iteration found, the same bits on every rank.

    Args:
        loss: the mean over the global batch.
        grad_norm: before clipping.
        flags: the greatest of each of the numbers that the ranks gave.
        skipped: why the parameters stayed as they were, since loss or norm is not finite; None where they did not.
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
        flags: gives numbers on which all ranks are to agree, as many on each; asked when the gradients are there.
        skips_nonfinite: leave the parameters as they are where loss or gradient norm is not finite.

    Raises:
        NonFiniteError: on every rank, before anything has changed, in that case otherwise.
    """
    parameters = list(state.parameters())
    for part in state.parts:
        part.optimizer.zero_grad(set_to_none=True)
    with context.loss_context():
        loss = forward_backward(state, micro_batches, keys, context)
    _finish_gradients(state, parameters, context)
    own = _Figures(float(loss), float(context.reports_loss), float(squared_norm(context.grad_norm_parameters)))
    rows, asked = _gather(cluster, own, flags())
    mean_loss = sum(row.loss * row.reports_loss for row in rows) / sum(row.reports_loss for row in rows)
    grad_norm = math.sqrt(sum(row.squared_norm for row in rows))
    agreed = tuple(max(column) for column in zip(*asked, strict=True))
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
    """One rank's figures of an iteration, gathered from all ranks in one message; a new one is a field more.

    `reports_loss` is 1 where the loss counts in the mean, else 0. The flags travel behind.
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
    """Return the error of an iteration, naming the first parameter in model order whose gradient is not finite."""
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
        fix="Nothing of this iteration was kept or saved. Lower optimizer.lr or mend the data, then resume; "
        "train.on_nonfinite=skip leaves such iterations out.",
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
    """Bring every gradient to the sum or mean over all axes that it is to be."""
    if context.is_tensor_parallel:
        for part in state.parts:
            reduce_partial_gradients(part.model)
    if context.data is not None and context.zero_stage == 0:
        average_gradients(parameters, context.data)
    if context.embedding_group is not None:
        sum_tied_gradients([part.model for part in state.parts], context.embedding_group)
