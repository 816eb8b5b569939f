"""A run's parallel axes, as training and evaluation use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.data.documents import WindowForm
from trainer.optim.exact_sum import NormShare
from trainer.parallel.lanes import Lanes
from trainer.parallel.pipeline import Pipeline
from trainer.parallel.reduction import GradientReduction


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """The parallel axes larger than 1, with an iteration's process groups and functions.

    Args:
        reduction: Turns an iteration's gradients into the mean over its global batch.
        lanes: An iteration's lanes, if losses and gradients have the same bits on any number of ranks. Otherwise None.
        needs_loss_parallel: Whether torch's `loss_parallel` computes the loss, from logits sharded over ranks.
        loss: Returns the mean cross entropy, given this rank's logits and targets.
        pipeline: This rank's stages, or None.
        reports_loss: Whether this rank's losses count in the mean. Among replicas, only a single rank's do.
        grad_norm_shares: This rank's parameters in the gradient norm.
        form: The form of micro-batch windows.
    """

    reduction: GradientReduction
    lanes: Lanes | None
    needs_loss_parallel: bool
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    pipeline: Pipeline | None
    reports_loss: bool
    grad_norm_shares: Sequence[NormShare]
    form: WindowForm

    @property
    def grad_norm_parameters(self) -> list[nn.Parameter]:
        """Return the parameters counted by this rank in the gradient norm if only the first replica counts."""
        return [share.parameter for share in self.grad_norm_shares if share.index == 0]

    def loss_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for computing and differentiating a loss over sharded logits."""
        if not self.needs_loss_parallel:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()
