"""Computes the validation loss over the first validation windows, in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reprise.tensors import free_gathered_parameters
from trainer.optim import exact_sum
from trainer.parallel.data import passes_of
from trainer.run.build import Run


@torch.no_grad()
def evaluate(run: Run) -> float | None:
    """Return the mean loss over the validation data, the same bits on every rank. A collective call.

    After every global batch, all ranks stop and return None if any of them has received a signal.
    """
    losses: list[float] = []
    context, cluster, is_stopped = run.context, run.cluster, False
    assert run.valid_data is not None
    with context.loss_context():
        for micro_batches in run.valid_data.eval_batches(run.config.train.eval_iters):
            losses += [float(loss) for loss in _losses(run, micro_batches)]
            is_stopped = cluster.counts([run.control.is_signalled()])[0] > 0
            if is_stopped:
                break
    for part in run.state.parts:
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


def _losses(run: Run, micro_batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the losses of this rank's micro-batches in a global batch, shaped as in training."""
    context = run.context
    if context.pipeline is not None:
        return context.pipeline.evaluate(torch.cat(list(micro_batches)))
    model, count = run.state.parts[0].model, len(micro_batches)
    passes = passes_of(model, count, run.share_of(run.config.train.global_batch_size))
    batches = (context.form.split(micro_batches[min(number, count - 1)]) for number in range(passes))
    losses = [context.loss(model(inputs.tokens, **inputs.keywords()), inputs.targets) for inputs in batches]
    return losses[:count]  # the last micro-batch fills other ranks' extra passes
