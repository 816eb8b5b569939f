"""A training iteration: the gradients of a global batch, their norm, and an optimizer step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from models.adapters import saved_tensors
from models.families import aliases
from reprise.errors import NonFiniteError
from reprise.live_tensors import local_of
from trainer.launch.process_group import Cluster
from trainer.metrics.slow_ranks import OwnTime, RankTime
from trainer.optim import exact_sum
from trainer.optim.adamw import clip_gradients, exact_squared_norm, set_learning_rate, squared_norm, stored_names
from trainer.parallel.context import ParallelContext
from trainer.run.state import TrainerState


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of an iteration, bit-identical on every rank.

    Args:
        loss: mean over the global batch.
        grad_norm: L2 norm of all gradients before clipping.
        flags: the element-wise maximum of the flags of all ranks.
        skipped: the error because of which the parameters stayed unchanged (`skips_nonfinite`), or None.
        rank_times: the seconds of each rank's own work.
    """

    loss: float
    grad_norm: float
    flags: tuple[float, ...] = ()
    skipped: NonFiniteError | None = None
    rank_times: tuple[RankTime, ...] = ()


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
    own_time: OwnTime | None = None,
) -> StepResult:
    """Run an iteration on this rank's micro batches and step the optimizers. A collective call.

    Args:
        micro_batches: int64 windows [micro_batch_size, seq_length + 1] on the device.
        keys: the dropout key of each micro batch.
        flags: called after the backward pass; returns numbers to reduce over the ranks, equally many on each.
        skips_nonfinite: leave the parameters unchanged instead of raising for a nonfinite loss or gradient norm.
        own_time: this rank's own work since the last iteration; this iteration's is added.

    Raises:
        NonFiniteError: on every rank, before any parameter changes, for a nonfinite loss or gradient norm.
    """
    for part in state.parts:
        part.optimizer.zero_grad(set_to_none=True)
    own_time = own_time or OwnTime(cluster.device)
    with context.loss_context(), contextlib.nullcontext() if context.waits_in_passes else own_time.working():
        losses = forward_backward(state, micro_batches, keys, context)
    context.reduction.finish()
    mean_loss, grad_norm, agreed, times = _reduce_figures(losses, flags(), context, cluster, own_time)
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        poisoned = _poisoned(state, mean_loss, grad_norm, cluster)
        if not skips_nonfinite:
            raise poisoned
        return StepResult(mean_loss, grad_norm, agreed, skipped=poisoned, rank_times=times)
    with own_time.working():
        clip_gradients(state.parameters(), grad_norm, clip_grad)
        for part in state.parts:
            set_learning_rate(part.optimizer, lr)
            part.optimizer.step()
    return StepResult(mean_loss, grad_norm, agreed, rank_times=times)


def _reduce_figures(
    losses: Sequence[torch.Tensor],
    flags: Sequence[float],
    context: ParallelContext,
    cluster: Cluster,
    own_time: OwnTime,
) -> tuple[float, float, tuple[float, ...], tuple[RankTime, ...]]:
    """Return the mean loss, the gradient norm, the maximum of the flags and the times of all ranks.

    A collective call.
    """
    if context.lanes is None:
        total = sum(losses, torch.zeros((), dtype=torch.float64, device=cluster.device))
        # Both are computed before the host waits, once, for a device.
        loss, square = torch.stack([total, squared_norm(context.grad_norm_parameters).to(total.device)]).tolist()
        squares: tuple[float, ...] = (square,)
        figures = _Figures((loss,), float(context.reports_loss), squares, own_time.take())
    else:
        squares = exact_squared_norm(context.grad_norm_shares)
        figures = _Figures(exact_sum.parts(_stacked(losses)), float(context.reports_loss), squares, own_time.take())
    rows, all_flags = _gather(cluster, figures, flags)
    agreed = tuple(max(column) for column in zip(*all_flags, strict=True))
    times = tuple(row.time for row in rows)
    reporting = [row for row in rows if row.reports_loss]
    if context.lanes is None:
        mean_loss = sum(row.loss[0] for row in reporting) / len(reporting)
        return mean_loss, math.sqrt(sum(row.squared_norm[0] for row in rows)), agreed, times
    mean_loss = exact_sum.total(part for row in reporting for part in row.loss) / context.lanes.micro_batches
    return mean_loss, math.sqrt(exact_sum.total(part for row in rows for part in row.squared_norm)), agreed, times


def _stacked(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(losses)) if losses else torch.zeros(0, dtype=torch.float64)


class _Figures(NamedTuple):
    """A rank's figures of an iteration, gathered from all ranks in a single message, followed by the flags.

    `loss` and `squared_norm` are a number each, or the parts of an exact sum. `reports_loss` is 1 if the loss counts in
    the mean, else 0.
    """

    loss: tuple[float, ...]
    reports_loss: float
    squared_norm: tuple[float, ...]
    time: RankTime


def _gather(cluster: Cluster, local: _Figures, flags: Sequence[float]) -> tuple[list[_Figures], list[Sequence[float]]]:
    """Return the figures and the flags of every rank. A collective call."""
    rows = cluster.gather([*local.loss, local.reports_loss, *local.squared_norm, *local.time, *flags])
    parts = len(local.loss)
    end = 2 * parts + 1
    figures = [
        _Figures(tuple(r[:parts]), r[parts], tuple(r[parts + 1 : end]), RankTime(*r[end : end + 2])) for r in rows
    ]
    return figures, [row[end + 2 :] for row in rows]


def _poisoned(state: TrainerState, loss: float, grad_norm: float, cluster: Cluster) -> NonFiniteError:
    """Return the error for the first parameter in model order with a non-finite gradient. A collective call."""
    names = list(saved_tensors(state.config))
    second = aliases(state.config)
    indices = [
        names.index(second.get(name, name))
        for part in state.parts
        for parameter, name in stored_names(part.model).items()
        if parameter.grad is not None and not bool(torch.isfinite(local_of(parameter.grad)).all())
    ]
    first = int(min(row[0] for row in cluster.gather([float(min(indices, default=len(names)))])))
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
) -> list[torch.Tensor]:
    """Accumulate the gradients of the micro batches; return their losses, 0-d float64, on ranks with losses.

    Each loss is divided by `GradientReduction.loss_divisor`.
    """
    reduction, count = context.reduction, len(micro_batches)
    divisor = reduction.loss_divisor(count)
    if context.pipeline is not None:
        pipeline_losses = context.pipeline.forward_backward(torch.cat(list(micro_batches)), torch.tensor(keys))
        return [loss.double() / divisor for loss in pipeline_losses]
    model, losses = state.parts[0].model, []
    for number, (windows, key) in enumerate(zip(micro_batches, keys, strict=True)):
        reduction.before_backward(number, count)
        inputs = context.form.split(windows)
        loss = context.loss(model(inputs.tokens, dropout_key=key, **inputs.keywords()), inputs.targets) / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        reduction.after_backward(number)
        losses.append(loss.detach().double())
    return losses
