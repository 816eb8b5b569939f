"""Tensors in storable form: their own plain memory, in a dtype that safetensors has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from reprise.errors import CheckpointError, MismatchError
from reprise.format.box import Box, intersect, relative
from reprise.format.layout import TensorKind, TensorSpec
from reprise.tensors.dtypes import is_storable, stored_dtype
from reprise.tensors.live import (
    GLOBAL_PLACE,
    Grid,
    LiveTensor,
    check_memory,
    is_described,
    local_of,
    locate,
    memory_holder,
    with_memory,
)
from reprise.tensors.modes import overwrite
from reprise.torch_private import is_a

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class StorableTensor:
    """A tensor in storable form.

    Args:
        tensor: Plain or a DTensor. Its memory is the given tensor's, or a copy.
        dtype: The given tensor's dtype name, if safetensors lacks it. `tensor` then has the same bytes as real numbers
            (complex dtypes, with a last dimension of 2) or as uint8 (some float8 dtypes).
        box: The position of `tensor` in a tensor shaped `shape`. None if its placement tells.
        copy_back: Copies `tensor` to the given tensor after a load. None if they share memory.
    """

    tensor: torch.Tensor
    dtype: str | None = None
    box: Box | None = None
    shape: tuple[int, ...] = ()
    copy_back: Callable[[], None] | None = None

    def parts(self, kind: TensorKind, name: str) -> Iterator[LiveTensor]:
        """Yield the live tensor, or nothing if this rank has no part in it. Other ranks' boxes are unknown here.

        Raises:
            CheckpointError: The placement is not a box, or safetensors lacks the dtype.
        """
        if self.box is None:
            yield from locate(kind, name, self.tensor, grid=Grid.flat(1))
        else:
            dtype = stored_dtype(self.tensor.dtype, where=name)
            yield LiveTensor(TensorSpec(kind, name, self.shape, dtype, self.shape), self.box, local_of(self.tensor), ())


def resolve(
    tensor: torch.Tensor, where: Callable[[], str], parameter: torch.Tensor | None = None
) -> StorableTensor | None:
    """Return a tensor in storable form, or None if this rank has no part in it.

    Args:
        where: Returns the tensor's place, for errors.
        parameter: The parameter whose optimizer state this is. State with its local shape has its shards.

    Raises:
        CheckpointError: Names a tensor that is not plain memory, one whose description contradicts itself, or one
            whose shards on this rank are not a box together.
    """
    local = memory_holder(tensor)
    is_local, is_async = local is tensor, False
    if type(local) not in _PLAIN:  # plain ones take the fast path: each save calls this for each tensor
        if is_async := is_a(local, "AsyncCollectiveTensor"):
            local = local.trigger_wait()  # type: ignore[attr-defined]
        if is_lazy(local) or type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise CheckpointError(
                "A tensor is of a class that keeps its memory elsewhere",
                where=where(),
                expected="a plain tensor or a DTensor",
                found=type(local).__name__,
                fix="Run a lazy module on a sample before the call. Pass other tensors' parts under their own keys.",
            )
    place = local if is_described(local) else parameter
    if is_described(place) and place.shape == local.shape:
        check_memory(where, local)
        return _described(local, place, where())
    local = source = local.detach()
    is_strided = local.layout is torch.strided and not local.is_nested
    if is_strided and (local.is_neg() or local.is_conj() or _repeated(local)):
        local = torch.empty(source.shape, dtype=source.dtype, device=source.device).copy_(source)
    check_memory(where, local)
    stored = _stored(local)
    if stored is source and not is_async:  # its version, too, is the given tensor's
        return StorableTensor(source if is_local else tensor.detach())
    dtype = None if stored.dtype == source.dtype else str(source.dtype).removeprefix("torch.")
    copy_back = None if local is source else partial(_copy_back, [local], [source], where())
    shape = (*tensor.shape, *stored.shape[source.ndim :])
    return StorableTensor(with_memory(tensor, stored, shape), dtype, copy_back=copy_back)


def _described(local: torch.Tensor, place: torch.Tensor, where: str) -> StorableTensor | None:
    """Return the shards in a local tensor as a box; None without shards.

    Args:
        place: A tensor that describes them, such as the local tensor itself.
        where: The tensor's place, for errors.

    Raises:
        CheckpointError: The description contradicts itself, or the shards leave gaps or overlap.
    """
    shape, offsets, starts, sizes = (getattr(place, name) for name in GLOBAL_PLACE)
    dims = {len(each) for each in (shape, *offsets, *starts, *sizes)}
    if dims != {local.ndim} or not len(offsets) == len(starts) == len(sizes):
        raise CheckpointError(
            "A tensor's description as shards of a global tensor contradicts itself",
            where=where,
            expected=f"an offset there, an offset here and a size for each shard, in {local.ndim} dimensions",
            found=f"{len(offsets)}, {len(starts)} and {len(sizes)} of them, in {sorted(dims)}",
            fix=f"Correct its {', '.join(GLOBAL_PLACE[1:])}.",
        )
    if not offsets:
        return None
    boxes = [Box(tuple(offset), tuple(size)) for offset, size in zip(offsets, sizes, strict=True)]
    parts = [local.detach()[Box(tuple(start), tuple(size)).slices] for start, size in zip(starts, sizes, strict=True)]
    start, end = np.min([box.offset for box in boxes], 0), np.max([box.end for box in boxes], 0)
    box = Box(tuple(start.tolist()), tuple((end - start).tolist()))
    overlaps = (intersect(a, b).numel for number, a in enumerate(boxes) for b in boxes[:number])
    if box.numel != sum(each.numel for each in boxes) or any(overlaps):
        raise CheckpointError(
            "A tensor's shards on this rank do not form a box",
            where=where,
            found=", ".join(map(str, boxes)),
            fix="Pass them as separate tensors.",
        )
    if len(parts) == 1:
        return StorableTensor(parts[0], box=box, shape=tuple(shape))
    packed = torch.empty(box.shape, dtype=local.dtype, device=local.device)
    views = [packed[relative(each, box).slices] for each in boxes]
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)
    copy_back = partial(_copy_back, views, parts, where)
    return StorableTensor(packed, box=box, shape=tuple(shape), copy_back=copy_back)


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
    if not is_storable(local.dtype) and local.dtype.is_floating_point and local.dtype.itemsize == 1:
        return local.view(torch.uint8)
    return local


def _copy_back(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], where: str) -> None:
    for source, target in zip(sources, targets, strict=True):
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
