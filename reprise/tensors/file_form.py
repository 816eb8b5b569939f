"""Tensors in storable form: their own plain memory, in a dtype that safetensors has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.format.box import Box
from reprise.format.layout import TensorKind, TensorSpec
from reprise.tensors.dtypes import STORED_DTYPES, stored_dtype
from reprise.tensors.live import (
    GLOBAL_PLACE,
    Grid,
    LiveTensor,
    is_described,
    locate,
    memory_holder,
    require_disjoint_elements,
    require_plain,
    with_memory,
)
from reprise.tensors.modes import overwrite
from reprise.torch_private import is_a


@dataclass(frozen=True, slots=True)
class StorableTensor:
    """A tensor in storable form.

    Args:
        tensor: Plain or a DTensor. Its memory is the given tensor's, or a copy.
        dtype: The given tensor's dtype name, if safetensors lacks it. `tensor` then has the same bytes as real numbers
            (complex dtypes, with a last dimension of 2) or as uint8 (some float8 dtypes).
        shape: The whole tensor's shape.
        box: The position of `tensor` in it. None if its placement tells.
        copy_back: Copies `tensor` to the given tensor after a load. None if they share memory.
    """

    tensor: torch.Tensor
    dtype: str | None
    shape: tuple[int, ...]
    box: Box | None
    copy_back: Callable[[], None] | None

    def parts(self, kind: TensorKind, name: str) -> Iterator[LiveTensor]:
        """Yield the live tensor, or nothing if this rank has no part in it. Other ranks' boxes are unknown here.

        Raises:
            CheckpointError: The placement is not a box, or safetensors lacks the dtype.
        """
        if self.box is None:
            yield from locate(kind, name, self.tensor, grid=Grid.flat(1))
        else:
            dtype = stored_dtype(self.tensor.dtype, where=name)
            yield LiveTensor(TensorSpec(kind, name, self.shape, dtype, self.shape), self.box, self.tensor, ())


def resolve(
    tensor: torch.Tensor, where: Callable[[], str], parameter: torch.Tensor | None = None
) -> StorableTensor | None:
    """Return a tensor in storable form, or None if this rank has no part in it.

    Args:
        where: Returns the tensor's place, for errors.
        parameter: The parameter whose optimizer state this is. State with its local shape has its shard.

    Raises:
        CheckpointError: Names a tensor that is not plain memory, or whose description as a shard contradicts itself.
    """
    local = memory_holder(tensor)
    if is_a(local, "AsyncCollectiveTensor"):
        local = local.trigger_wait()  # type: ignore[attr-defined]
        tensor = with_memory(tensor, local)
    require_plain(where, local)
    source, shape, offset = local.detach(), tuple(tensor.shape), None
    described = local if is_described(local) else parameter
    if is_described(described) and described.shape == local.shape:
        if (shard := _shard_of(described, where)) is None:
            return None
        shape, offset, part = shard
        source = tensor = source[part.slices]
    local = source
    if local.is_neg() or local.is_conj() or _repeated(local):
        local = torch.empty(source.shape, dtype=source.dtype, device=source.device).copy_(source)
    require_disjoint_elements(where, local)
    stored = _stored(local)
    dtype = None if stored.dtype == source.dtype else str(source.dtype).removeprefix("torch.")
    copy_back = None if local is source else partial(_copy_back, local, source, where())
    further = stored.shape[source.ndim :]
    box = None if offset is None else Box((*offset, *(0 for _ in further)), tuple(stored.shape))
    # A detached tensor's version, too, is the given tensor's.
    storable = tensor.detach() if stored is source else with_memory(tensor, stored)
    return StorableTensor(storable, dtype, (*shape, *further), box, copy_back)


def _shard_of(place: torch.Tensor, where: Callable[[], str]) -> tuple[tuple[int, ...], tuple[int, ...], Box] | None:
    """Return a global tensor's shape, a local tensor's offset in it, and its box in the local one; None without any.

    Args:
        place: A tensor that describes them, such as the local tensor itself.
        where: Returns the tensor's place, for errors.

    Raises:
        CheckpointError: The description contradicts itself, or has several shards.
    """
    shape, *lists = (getattr(place, name) for name in GLOBAL_PLACE)
    if not any(lists):
        return None
    counts, dims = [len(each) for each in lists], {len(each) for each in (shape, *itertools.chain(*lists))}
    if counts != [1, 1, 1] or dims != {place.ndim}:
        raise CheckpointError(
            "A tensor's description as a shard of a global tensor does not fit",
            where=where(),
            expected=f"one offset there, one offset here and one size, in {place.ndim} dimensions",
            found=f"{counts} of them, in {sorted(dims)}",
            fix=f"Correct its {', '.join(GLOBAL_PLACE[1:])}, or pass its shards as separate tensors.",
        )
    (offset,), (start,), (size,) = lists
    return tuple(shape), tuple(offset), Box(tuple(start), tuple(size))


def in_memory(stored: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Convert a tensor from storable form to `dtype`. None keeps its own dtype.

    Raises:
        MismatchError: It is not a storable form for this dtype.
    """
    if dtype is None:
        return stored
    target: torch.dtype = getattr(torch, dtype)
    try:
        return torch.view_as_complex(stored) if target.is_complex else stored.view(target)
    except RuntimeError as error:
        form = f"{stored.dtype} of shape {list(stored.shape)}"
        raise MismatchError("A tensor is not in the form of its dtype", expected=dtype, found=form) from error


def _stored(local: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a dtype that safetensors has, if there is one."""
    if local.is_complex():
        return torch.view_as_real(local)
    if local.dtype not in STORED_DTYPES and local.dtype.is_floating_point and local.dtype.itemsize == 1:
        return local.view(torch.uint8)
    return local


def _copy_back(source: torch.Tensor, target: torch.Tensor, where: str) -> None:
    first = source
    for dim in _repeated(target):
        first, target = first.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    if first is not source and not bytes_of(first.expand_as(source)).equal(bytes_of(source)):
        raise MismatchError(
            "The elements of an expanded tensor share memory, and a checkpoint has different ones for them",
            where=where,
            fix="Pass a tensor with memory for each element, such as tensor.clone().",
        )
    overwrite(target, first)


def _repeated(local: torch.Tensor) -> list[int]:
    """Return the dimensions along which all elements share memory."""
    if local.is_contiguous():
        return []
    sizes = zip(local.stride(), local.shape, strict=True)
    return [dim for dim, (stride, size) in enumerate(sizes) if stride == 0 and size > 1 and local.numel()]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's bytes in C order, as a 1-d uint8 tensor."""
    return _stored(tensor).contiguous().reshape(-1).view(torch.uint8)


def memory_of(local: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in C order: its own memory if possible, otherwise a copy on the host."""
    return memoryview(bytes_of(local.detach()).cpu().numpy())  # type: ignore[arg-type]
