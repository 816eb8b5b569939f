"""A training iteration: the gradients for a global batch, their norm, and an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
import torch
import torch.distributed as dist

from models.adapters import saved_tensors
from models.families import aliases
from reprise.errors import NonFiniteError
from reprise.tensors import local_of
from trainer.data.loader import to_device
from trainer.launch.device import CPU
from trainer.launch.process_group import Cluster
from trainer.optim import exact_sum
from trainer.optim.adamw import clip_gradients, gradient_squares, set_learning_rate, squared_norm, stored_names
from trainer.parallel.context import ParallelContext
from trainer.parallel.data import passes_of
from trainer.run.state import TrainerState


@dataclass(frozen=True, slots=True)
class StepResult:
    """An iteration's result, bit-identical on every rank.

    Args:
        loss: Mean over the global batch.
        grad_norm: L2 norm over all gradients before clipping.
        flags: How many ranks set each flag.
        skipped: The error for which the parameters stayed unchanged (`skips_nonfinite`), or None.
        data_seconds: How long this rank loaded data.
    """

    loss: float
    grad_norm: float
    flags: tuple[int, ...] = ()
    skipped: NonFiniteError | None = None
    data_seconds: float = 0.0


def train_step(
    state: TrainerState,
    micro_batches: Sequence[torch.Tensor],
    *,
    keys: Sequence[int],
    share: float,
    lr: float,
    clip_grad: float,
    context: ParallelContext,
    cluster: Cluster,
    flags: Callable[[], Sequence[bool]] = tuple,
    skips_nonfinite: bool = False,
) -> StepResult:
    """Run an iteration on this rank's micro-batches and step the optimizers. A collective call.

    Args:
        micro_batches: int64 windows [micro_batch_size, seq_length + 1] on the device.
        keys: Each micro-batch's dropout key.
        share: Mean micro-batch count per data-parallel rank.
        flags: Called after the backward pass. All ranks return equally many flags.
        skips_nonfinite: Leave the parameters unchanged instead of raising for a nonfinite loss or gradient norm.

    Raises:
        NonFiniteError: The loss or gradient norm is not finite. Raised on every rank, before any parameter changes.
    """
    for parameter in state.parameters():
        parameter.grad = None
    with context.loss_context():
        losses = forward_backward(state, micro_batches, keys, context, share)
    context.reduction.finish()
    figures = reduce_figures(losses, flags(), context, cluster)
    mean_loss, grad_norm = figures.loss, figures.grad_norm
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        poisoned = _poisoned(state, mean_loss, grad_norm, cluster)
        if not skips_nonfinite:
            raise poisoned
        return replace(figures, skipped=poisoned)
    clip_gradients(state.parameters(), grad_norm, clip_grad)
    for part in state.parts:
        set_learning_rate(part.optimizer, lr)
        part.optimizer.step()
    return figures


def reduce_figures(
    losses: Sequence[torch.Tensor], flags: Sequence[bool], context: ParallelContext, cluster: Cluster
) -> StepResult:
    """Return the mean loss, the gradient norm and all ranks' flags. A collective call.

    Ranks sum a single int64 message on their devices; the host waits only for the result. It has the limbs for the loss
    and the squared norm, whether the rank reports a loss, and its flags.
    """
    if cluster.world_size == 1 and (context.lanes is None or cluster.device.type == CPU):
        return _figures_alone(losses, flags, context, cluster)
    if not context.reports_loss:
        losses = ()
    if context.lanes is None:
        total = sum(losses, torch.zeros((), dtype=torch.float64, device=cluster.device))
        square = squared_norm(context.grad_norm_parameters).to(cluster.device)
        limbs = exact_sum.limbs(torch.stack([total, square])).view(-1)
    else:
        values = torch.stack(list(losses)) if losses else torch.zeros(0, dtype=torch.float64, device=cluster.device)
        limbs = exact_sum.sum_limbs([values, gradient_squares(context.grad_norm_shares, cluster.device)]).view(-1)
    counts = to_device(np.array([context.reports_loss, *flags], np.int64), limbs.device)  # the host does not wait
    row, columns = cluster.reduced(torch.cat([limbs, counts])).tolist(), exact_sum.COLUMNS
    loss, square_sum = exact_sum.value(row[:columns]), exact_sum.value(row[columns : 2 * columns])
    reporting, *counted = row[2 * columns :]
    divisor = reporting if context.lanes is None else context.lanes.micro_batches
    return StepResult(loss / divisor, math.sqrt(square_sum), tuple(counted))


def _figures_alone(
    losses: Sequence[torch.Tensor], flags: Sequence[bool], context: ParallelContext, cluster: Cluster
) -> StepResult:
    """Return a single rank's figures, with the bits of a reduced message. Its limbs take 0.3 ms."""
    if context.lanes is None:
        square = squared_norm(context.grad_norm_parameters).to(cluster.device)
        *values, square_sum = torch.stack([*losses, square]).tolist()
        return StepResult(reduce(add, values, 0.0), math.sqrt(square_sum), tuple(map(int, flags)))
    shares = context.grad_norm_shares  # on a CPU: the host reads each number
    squares = gradient_squares(shares, cluster.device).tolist()
    loss = exact_sum.rounded_once(torch.stack(list(losses)).tolist()) / context.lanes.micro_batches
    return StepResult(loss, math.sqrt(exact_sum.rounded_once(squares)), tuple(map(int, flags)))


def _poisoned(state: TrainerState, loss: float, grad_norm: float, cluster: Cluster) -> NonFiniteError:
    """Return the error, naming the first parameter in model order with a nonfinite gradient. A collective call."""
    names = list(saved_tensors(state.config))
    second = aliases(state.config)
    indices = [
        names.index(second.get(name, name))
        for part in state.parts
        for parameter, name in stored_names(part.model).items()
        if parameter.grad is not None and not bool(torch.isfinite(local_of(parameter.grad)).all())
    ]
    furthest = torch.tensor([-min(indices, default=len(names))], device=cluster.device)
    first = -int(cluster.reduced(furthest, dist.ReduceOp.MAX))
    place = f"gradient of {names[first]}" if first < len(names) else "all gradients are finite, their norm is not"
    return NonFiniteError(
        "Loss or gradients are not finite",
        where=f"iteration {state.progress.iteration + 1}, {place}",
        found=f"loss {loss}, gradient norm {grad_norm}",
        fix="Nothing from this iteration was kept or saved. Lower optimizer.lr or fix the data, then resume; "
        "train.on_nonfinite=skip skips such iterations.",
    )


def forward_backward(
    state: TrainerState,
    micro_batches: Sequence[torch.Tensor],
    keys: Sequence[int],
    context: ParallelContext,
    share: float,
) -> list[torch.Tensor]:
    """Accumulate gradients over the micro-batches. Return their losses, 0-d float64, on ranks with losses.

    Each loss is divided by `share`; with lanes, whose sums are divided later, by 1. If other ranks have an extra pass,
    the last micro-batch fills it with weight 0.

    Args:
        share: See `train_step`.
    """
    reduction, count = context.reduction, len(micro_batches)
    divisor = share if context.lanes is None else 1
    if context.pipeline is not None:
        pipeline_losses = context.pipeline.forward_backward(torch.cat(list(micro_batches)), torch.tensor(keys))
        return [loss.double() / divisor for loss in pipeline_losses]
    model, losses = state.parts[0].model, []
    passes = passes_of(model, count, share)
    for number in range(passes):
        reduction.before_backward(number, passes)
        place = min(number, count - 1)
        inputs = context.form.split(micro_batches[place])
        logits = model(inputs.tokens, dropout_key=keys[place], **inputs.keywords())
        loss = context.loss(logits, inputs.targets) / divisor
        (loss if number < count else loss * 0).backward()  # type: ignore[no-untyped-call]
        reduction.after_backward(number)
        if number < count:
            losses.append(loss.detach().double())
    return losses
