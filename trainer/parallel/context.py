"""The axes of a run that are longer than 1, as training and evaluation need them. Who makes them is told elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.parallel.pipeline import Pipeline
from trainer.parallel.tensor import loss_parallel


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """The axes that are longer than 1, as an iteration needs them.

    Args:
        data: the data-parallel mesh, or None.
        is_tensor_parallel: whether weights, and with them the logits, are cut over ranks.
        loss: the mean cross entropy of this rank's logits and targets.
        gather_logits: makes logits [batch, rows] of one position whole where the vocabulary is cut; collective then.
        pipeline: this rank's stages, or None.
        embedding_group: the group over which tied embeddings of the first and last stage sum their gradients, or None.
        reports_loss: whether this rank's losses count in the mean; replicas count once.
        grad_norm_parameters: this rank's parameters that count in the gradient norm; replicas count once.
    """

    zero_stage: int
    data: DeviceMesh | None
    is_tensor_parallel: bool
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gather_logits: Callable[[torch.Tensor], torch.Tensor]
    pipeline: Pipeline | None
    embedding_group: dist.ProcessGroup | None
    reports_loss: bool
    grad_norm_parameters: Sequence[nn.Parameter]

    def loss_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a loss over cut logits is computed and differentiated."""
        if not self.is_tensor_parallel:
            return contextlib.nullcontext()
        return loss_parallel()
