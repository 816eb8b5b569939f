"""Data parallelism: ZeRO stages 1 to 3 by torch's FSDP2, stage 0 by reducing whole gradients.

An axis of size 1 is not applied at all. Which samples a rank reads is told elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.checkpoint.tensors.live import local_of

# Gradients are reduced in buckets of this size, as DistributedDataParallel does by default.
_BUCKET_BYTES = 25 << 20


def shard(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, *, zero_stage: int, compute_dtype: torch.dtype
) -> None:
    """Shard a model by rows of each parameter over a one-dimensional mesh; stage 0 leaves it as it is.

    Every block is a group of its own. The rest, both ends of tied embeddings among it, is one group: separate groups
    would break the tie.
    """
    if zero_stage == 0:
        return
    # Logits cut over tensor-parallel ranks are a view; FSDP2 warns of in-place changes of them, and nobody makes any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard_after_forward = zero_stage == 3
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)


def set_gradient_sync(model: nn.Module, *, zero_stage: int, is_last_micro_batch: bool) -> None:
    """Say whether the next backward pass reduces gradients: stage 1 only after the last micro batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(zero_stage >= 2 or is_last_micro_batch)


def average_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average whole gradients over a one-dimensional mesh, in place, in buckets. A collective call."""
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is not None:
            bucket.append(local_of(parameter.grad))
            size += bucket[-1].nbytes
        if size >= _BUCKET_BYTES:
            _average(bucket, mesh)
            bucket, size = [], 0
    if bucket:
        _average(bucket, mesh)


def _average(gradients: list[torch.Tensor], mesh: DeviceMesh) -> None:
    flat = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
    dist.all_reduce(flat, group=mesh.get_group())
    flat /= mesh.size()
    parts = _unflatten_dense_tensors(flat, gradients)  # type: ignore[no-untyped-call]
    for gradient, reduced in zip(gradients, parts, strict=True):
        gradient.copy_(reduced)
