"""Gradient reduction over micro-batches and ranks: the interface, and the mean in the library's own order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.network import Model
from trainer.parallel.data import average_gradients, set_gradient_sync
from trainer.parallel.pipeline import sum_tied_gradients


class GradientReduction(ABC):
    """Reduces an iteration's gradients to the mean over its global batch.

    Without a pipeline, `before_backward` and `after_backward` are called around each micro-batch's passes. All ranks
    call `finish` after the last micro-batch. Then every parameter's `grad` is the mean.
    """

    @abstractmethod
    def before_backward(self, number: int, micro_batches: int) -> None:
        """Prepare this rank's pass `number`, counted from 0, out of `micro_batches` passes."""

    def after_backward(self, number: int) -> None:  # noqa: B027
        """Collect the gradients from micro-batch `number`, unless autograd or hooks have added them."""

    @abstractmethod
    def finish(self) -> None:
        """Reduce over all ranks and set the gradients. A collective call."""


@dataclass(frozen=True, slots=True)
class MeanReduction(GradientReduction):
    """Adds micro-batches in autograd, and averages over ranks with FSDP2 or an all-reduce. The topology sets the order.

    Args:
        parameters: This rank's trainable parameters.
        data: The data-parallel mesh, or None.
        embedding_group: The ranks whose first and last stage sum a tied embedding's gradients, or None.
        has_copies: Whether the sharded state has several copies, see `parallel.replicate`.
    """

    models: Sequence[Model]
    parameters: Sequence[nn.Parameter]
    zero_stage: int
    data: DeviceMesh | None
    is_tensor_parallel: bool
    embedding_group: dist.ProcessGroup | None
    has_copies: bool = False

    def before_backward(self, number: int, micro_batches: int) -> None:
        (model,) = self.models
        is_last = number == micro_batches - 1
        set_gradient_sync(model, is_on=self.zero_stage >= 2 or is_last, over_copies=is_last or not self.has_copies)

    def finish(self) -> None:
        if self.is_tensor_parallel:
            from trainer.parallel.tensor import reduce_partial_gradients

            for model in self.models:
                reduce_partial_gradients(model)
        if self.data is not None and self.zero_stage == 0:
            average_gradients(self.parameters, self.data)
        if self.embedding_group is not None:
            sum_tied_gradients(self.models, self.embedding_group)
