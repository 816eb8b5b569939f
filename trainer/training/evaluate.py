"""Computes the validation loss over the first validation windows, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from reprise.tensors import free_gathered_parameters
from trainer.launch.process_group import Cluster
from trainer.optim import exact_sum
from trainer.parallel.context import ParallelContext
from trainer.parallel.data import passes_of
from trainer.run.state import TrainerState


@torch.no_grad()
def evaluate(
    state: TrainerState,
    batches: Iterable[Sequence[torch.Tensor]],
    *,
    context: ParallelContext,
    cluster: Cluster,
    share: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Return the mean loss over global batches, the same bits on every rank. A collective call.

    Args:
        batches: This rank's micro-batches in each global batch, int64 windows [micro_batch_size, seq_length + 1] on the
            device, shaped as in training.
        share: Mean micro-batch count per data-parallel rank. By default, equal to this rank's count.
        should_stop: Called after every batch. If it returns True on any rank, all ranks stop and return None.
    """
    losses: list[float] = []
    is_stopped = False
    with context.loss_context():
        for micro_batches in batches:
            losses += [float(loss) for loss in _losses(state, micro_batches, context, share)]
            is_stopped = cluster.counts([should_stop()])[0] > 0
            if is_stopped:
                break
    for part in state.parts:
        free_gathered_parameters(part.model)
    if is_stopped:
        return None
    counted = losses if context.reports_loss else []
    if context.lanes is None:
        limbs = exact_sum.limbs(torch.tensor([sum(counted)], dtype=torch.float64))[0]
    else:
        limbs = exact_sum.sum_limbs([torch.tensor(counted, dtype=torch.float64)])[0]
    *sums, count = cluster.counts([*limbs.tolist(), len(counted)])
    return exact_sum.value(sums) / count


def _losses(
    state: TrainerState, micro_batches: Sequence[torch.Tensor], context: ParallelContext, share: float | None
) -> list[torch.Tensor]:
    if context.pipeline is not None:
        return context.pipeline.evaluate(torch.cat(list(micro_batches)))
    model, count = state.parts[0].model, len(micro_batches)
    passes = passes_of(model, count, count if share is None else share)
    batches = (context.form.split(micro_batches[min(number, count - 1)]) for number in range(passes))
    losses = [context.loss(model(inputs.tokens, **inputs.keywords()), inputs.targets) for inputs in batches]
    return losses[:count]  # the last micro-batch fills other ranks' extra passes
