"""A run's parallel axes, as training and evaluation use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from trainer.data.documents import WindowForm
from trainer.optim.exact_sum import NormShare
from trainer.parallel.lanes import Lanes
from trainer.parallel.pipeline import Loss, Pipeline
from trainer.parallel.reduction import GradientReduction


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """The parallel axes larger than 1, with an iteration's process groups and functions.

    Args:
        reduction: Turns an iteration's gradients into the mean over its global batch.
        lanes: An iteration's lanes, if losses and gradients have the same bits on any number of ranks. Otherwise None.
        loss: The loss function.
        loss_context: Returns the context in which a loss is computed and differentiated: torch's `loss_parallel` for
            logits sharded over ranks.
        pipeline: This rank's stages, or None.
        reports_loss: Whether this rank's losses count in the mean. Among replicas, only a single rank's do.
        grad_norm_shares: This rank's parameters in the gradient norm.
        form: The form of micro-batch windows.
    """

    reduction: GradientReduction
    lanes: Lanes | None
    loss: Loss
    loss_context: Callable[[], AbstractContextManager[None]]
    pipeline: Pipeline | None
    reports_loss: bool
    grad_norm_shares: Sequence[NormShare]
    form: WindowForm

    @property
    def grad_norm_parameters(self) -> list[nn.Parameter]:
        """Return the parameters counted by this rank in the gradient norm if only the first replica counts."""
        return [share.parameter for share in self.grad_norm_shares if share.index == 0]
