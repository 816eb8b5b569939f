"""Tensors in storable form: their own plain memory, in a dtype that safetensors has."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.format.box import Box, intersect, relative, whole
from reprise.format.layout import TensorKind, TensorSpec
from reprise.tensors.dtypes import STORED_DTYPES, stored_dtype
from reprise.tensors.live import (
    GLOBAL_PLACE,
    Grid,
    LiveTensor,
    is_described,
    locate,
    memory_holder,
    require_plain,
    with_memory,
)
from reprise.tensors.modes import overwrite


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
        parameter: The parameter whose optimizer state this is. State with its local shape has its shards.

    Raises:
        CheckpointError: Names a tensor that is not plain memory, one whose description contradicts itself, or one
            whose shards on this rank are not a box together.
    """
    local = memory_holder(tensor)
    if hasattr(local, "trigger_wait"):  # the result of a collective call that may still be running
        local = local.trigger_wait()
        tensor = with_memory(tensor, local)
    require_plain(where, local)
    source, shape, box = local.detach(), tuple(tensor.shape), None
    pairs = [(whole(tuple(source.shape)), source)]
    described = local if is_described(local) else parameter
    if is_described(described) and described.shape == local.shape:
        shape, shards = _shards_of(described, where)
        if not shards:
            return None
        box = _box_of([shard for shard, _ in shards], where)
        pairs = [(relative(shard, box), source[part.slices]) for shard, part in shards]
        source = tensor = pairs[0][1]
    local = source
    if len(pairs) > 1 or local.is_neg() or local.is_conj() or _may_overlap_itself(local):
        local = torch.empty(source.shape if box is None else box.shape, dtype=source.dtype, device=source.device)
        for part, memory in pairs:
            local[part.slices] = memory
    stored = _stored(local)
    dtype = None if stored.dtype == source.dtype else str(source.dtype).removeprefix("torch.")
    copy_back = None if local is source else partial(_copy_back, local, pairs, where())
    further = stored.shape[source.ndim :]
    box = box and Box((*box.offset, *(0 for _ in further)), tuple(stored.shape))
    # A detached tensor's version, too, is the given tensor's.
    storable = tensor.detach() if stored is source else with_memory(tensor, stored)
    return StorableTensor(storable, dtype, (*shape, *further), box, copy_back)


def _shards_of(place: torch.Tensor, where: Callable[[], str]) -> tuple[tuple[int, ...], list[tuple[Box, Box]]]:
    """Return a global tensor's shape, and each shard's box there and in the local tensor.

    Args:
        place: A tensor that describes them, such as the local tensor itself.
        where: Returns the tensor's place, for errors.

    Raises:
        CheckpointError: The description contradicts itself.
    """
    shape, *lists = (getattr(place, name) for name in GLOBAL_PLACE)
    counts, dims = [len(each) for each in lists], {len(each) for each in (shape, *itertools.chain(*lists))}
    if len(set(counts)) > 1 or dims != {place.ndim}:
        raise CheckpointError(
            "A tensor's description as shards of a global tensor contradicts itself",
            where=where(),
            expected=f"an offset there, an offset here and a size for each shard, in {place.ndim} dimensions",
            found=f"{counts} of them, in {sorted(dims)}",
            fix=f"Correct its {', '.join(GLOBAL_PLACE[1:])}.",
        )
    rows = [map(tuple, row) for row in zip(*lists, strict=True)]
    return tuple(shape), [(Box(offset, size), Box(start, size)) for offset, start, size in rows]


def _box_of(boxes: Sequence[Box], where: Callable[[], str]) -> Box:
    """Return the box that disjoint boxes fill.

    Raises:
        CheckpointError: They leave gaps or overlap.
    """
    start = tuple(map(min, zip(*(box.offset for box in boxes), strict=True)))
    end = map(max, zip(*(box.end for box in boxes), strict=True))
    union = Box(start, tuple(map(operator.sub, end, start)))
    if union.numel != sum(box.numel for box in boxes) or any(
        intersect(a, b).numel for a, b in itertools.combinations(boxes, 2)
    ):
        raise CheckpointError(
            "A tensor's shards on this rank do not form a box",
            where=where(),
            found=", ".join(map(str, boxes)),
            fix="Pass them as separate tensors.",
        )
    return union


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


def _copy_back(packed: torch.Tensor, pairs: Sequence[tuple[Box, torch.Tensor]], where: str) -> None:
    for part, target in pairs:
        source = packed[part.slices]
        # Torch refuses to write to a dimension along which all elements share memory.
        first_elements = tuple(slice(None, None if stride else 1) for stride in target.stride())
        overwrite(target[first_elements], source[first_elements])
        elements = torch.empty_like(source).copy_(target) if _may_overlap_itself(target) else None
        if elements is not None and not bytes_of(elements).equal(bytes_of(source)):
            raise MismatchError(
                "Elements of a tensor share memory, and a checkpoint has different values for them",
                where=where,
                fix="Pass a tensor with memory for each element, such as tensor.clone().",
            )


def _may_overlap_itself(local: torch.Tensor) -> bool:
    """Return False only if every element certainly has its own bytes, because the strides do not overlap."""
    if local.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and local.numel():
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's bytes in C order, as a 1-d uint8 tensor."""
    return _stored(tensor).contiguous().reshape(-1).view(torch.uint8)
