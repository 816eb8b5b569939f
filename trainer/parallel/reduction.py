"""The reduction of gradients over micro batches and ranks: an interface, and the mean in the order of the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.network import Model
from trainer.parallel.data import average_gradients, set_gradient_sync
from trainer.parallel.pipeline import sum_tied_gradients


class GradientReduction(Protocol):
    """The reduction of the gradients of an iteration into the mean over its global batch.

    Without a pipeline, `before_backward` and `after_backward` are called around the passes of every micro batch. All
    ranks call `finish` after the last; then `grad` of every parameter is the mean.
    """

    def loss_divisor(self, share: float) -> float:
        """Return the number by which the loss of each of this rank's micro batches is divided before its backward.

        Args:
            share: the mean number of micro batches of a data-parallel rank.
        """

    def before_backward(self, number: int, micro_batches: int) -> None:
        """Prepare for this rank's pass `number`, from 0, of `micro_batches`."""

    def after_backward(self, number: int) -> None:
        """Collect the gradients of micro batch `number`."""

    def finish(self) -> None:
        """Reduce over all ranks and set the gradients. A collective call."""


@dataclass(frozen=True, slots=True)
class MeanReduction(GradientReduction):
    """Autograd adds the micro batches, FSDP2 or an all-reduce averages over ranks; the order depends on the topology.

    Args:
        parameters: this rank's trainable parameters.
        data: the data-parallel mesh, or None.
        embedding_group: see `ParallelContext`.
        has_copies: whether there are several copies of the sharded state, see `parallel.replicate`.
    """

    models: Sequence[Model]
    parameters: Sequence[nn.Parameter]
    zero_stage: int
    data: DeviceMesh | None
    is_tensor_parallel: bool
    embedding_group: dist.ProcessGroup | None
    has_copies: bool = False

    def loss_divisor(self, share: float) -> float:
        return share

    def before_backward(self, number: int, micro_batches: int) -> None:
        (model,) = self.models
        is_last = number == micro_batches - 1
        set_gradient_sync(model, is_on=self.zero_stage >= 2 or is_last, over_copies=is_last or not self.has_copies)

    def after_backward(self, number: int) -> None:
        """Autograd has added the gradients."""

    def finish(self) -> None:
        if self.is_tensor_parallel:
            from trainer.parallel.tensor import reduce_partial_gradients

            for model in self.models:
                reduce_partial_gradients(model)
        if self.data is not None and self.zero_stage == 0:
            average_gradients(self.parameters, self.data)
        if self.embedding_group is not None:
            sum_tied_gradients(self.models, self.embedding_group)
