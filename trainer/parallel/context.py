"""The parallel axes of a run, as training and evaluation use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.documents import WindowForm
from trainer.optim.exact_sum import NormShare
from trainer.parallel.lanes import Lanes
from trainer.parallel.pipeline import Pipeline
from trainer.parallel.reduction import GradientReduction


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """The parallel axes of size greater than 1, with the groups and functions of an iteration.

    Args:
        reduction: makes the gradients of an iteration the mean over its global batch.
        lanes: the lanes of an iteration, if losses and gradients have the same bits on any number of ranks, else None.
        needs_loss_parallel: whether torch's `loss_parallel` computes the loss, of logits sharded over ranks.
        loss: the mean cross entropy of this rank's logits and targets.
        gather_logits: gathers the logits [batch, local rows] of a position over the vocabulary; a collective call
            with tensor parallelism, the identity without.
        pipeline: this rank's stages, or None.
        embedding_group: the group over which tied embeddings of the first and last stage sum their gradients, or None.
        reports_loss: whether this rank's losses count in the mean; of replicas, a single rank's do.
        grad_norm_shares: this rank's parameters in the gradient norm.
        form: of the windows of micro batches.
        waits_in_passes: whether ranks exchange messages within the forward and backward pass.
    """

    reduction: GradientReduction
    lanes: Lanes | None
    needs_loss_parallel: bool
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gather_logits: Callable[[torch.Tensor], torch.Tensor]
    pipeline: Pipeline | None
    embedding_group: dist.ProcessGroup | None
    reports_loss: bool
    grad_norm_shares: Sequence[NormShare]
    form: WindowForm
    waits_in_passes: bool = False

    @property
    def grad_norm_parameters(self) -> list[nn.Parameter]:
        """Return the parameters counted by this rank in the gradient norm if the first of all replicas counts."""
        return [share.parameter for share in self.grad_norm_shares if share.index == 0]

    def loss_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a loss over sharded logits is computed and differentiated."""
        if not self.needs_loss_parallel:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()
