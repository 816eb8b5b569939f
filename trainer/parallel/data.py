"""Data parallelism: ZeRO stages 1 to 3 with torch's FSDP2, and stage 0 with an all-reduce over full gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from reprise.tensors import is_fsdp_module, local_of
from reprise.torch_private import _flatten_dense_tensors, _unflatten_dense_tensors

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# The bucket size for gradient reduction, DistributedDataParallel's default.
BUCKET_BYTES = 25 << 20

T = TypeVar("T")


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    zero_stage: int,
    compute_dtype: torch.dtype,
    rest_dtype: torch.dtype,
) -> None:
    """Shard each parameter's rows over a mesh's last dimension. Stage 0 leaves the model unchanged.

    On a two-dimensional mesh, FSDP2 keeps copies over the first dimension.

    Every block is its own FSDP group. All other parameters form a single group, because separate groups would untie the
    embedding from the output layer.

    Args:
        compute_dtype: The dtype in which block parameters are gathered.
        rest_dtype: The dtype in which all other parameters are gathered.
    """
    if zero_stage == 0:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Logits sharded over tensor-parallel ranks are a view. FSDP2 warns about in-place changes to views; there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    reshard_after_forward = zero_stage == 3

    def policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy(compute_dtype))
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy(rest_dtype))


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return a model's FSDP2 modules."""
    return [cast("FSDPModule", module) for module in model.modules() if is_fsdp_module(module)]


def set_gradient_sync(model: nn.Module, *, is_on: bool, over_copies: bool = True) -> None:
    """Set whether the next backward pass reduces a sharded model's gradients over ranks.

    Args:
        over_copies: Whether to reduce over the state's copies too, and not only over each copy's ranks.
    """
    if is_fsdp_module(model):
        module = cast("FSDPModule", model)
        module.set_requires_gradient_sync(is_on)
        if not over_copies:
            module.set_requires_all_reduce(False)


def passes_of(model: nn.Module, count: int, share: float) -> int:
    """Return a rank's pass count in an iteration, given its `count` micro-batches.

    With FSDP2 a pass is a collective call, so all ranks make as many passes as the rank with the most micro-batches.

    Args:
        share: The mean micro-batch count per data-parallel rank.
    """
    return math.ceil(share) if is_fsdp_module(model) else count


def buckets(items: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Group successive items into lists, each for a collective call. A list ends at `BUCKET_BYTES` or more."""
    bucket, size = list[T](), 0
    for item in items:
        bucket.append(item)
        size += nbytes(item)
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def average_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average full gradients over a 1-D mesh, in place and in buckets. A collective call."""
    gradients = (local_of(parameter.grad) for parameter in parameters if parameter.grad is not None)
    for bucket in buckets(gradients, lambda gradient: gradient.nbytes):
        _average(bucket, mesh)


def _average(gradients: list[torch.Tensor], mesh: DeviceMesh) -> None:
    flat = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
    dist.all_reduce(flat, group=mesh.get_group())
    flat /= mesh.size()
    parts = _unflatten_dense_tensors(flat, gradients)  # type: ignore[no-untyped-call]
    for gradient, reduced in zip(gradients, parts, strict=True):
        gradient.copy_(reduced)
