"""FSDP2's reduce-scatter in a fixed binary tree. Separate from the tree itself, because it imports FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from reprise.torch_private import ReduceScatter
from trainer.parallel.halving import sum_scatter


class TreeReduceScatter(ReduceScatter):
    """An FSDP2 module's reduce-scatter as a fixed tree, see `sum_scatter`."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum `input_tensor` over the group, and write this rank's chunk into `output_tensor`."""
        assert not async_op
        output_tensor.copy_(sum_scatter(input_tensor, group))
