"""Rectangles of a tensor, and the bytes they occupy in it. Pure arithmetic; `live.py` knows where a box comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open rectangle `[offset, offset + shape)` of a tensor, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box:
    """Return the common part of two boxes of one tensor; its `numel` is 0 where they do not meet."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    end = tuple(min(x, y) for x, y in zip(a.end, b.end, strict=True))
    return Box(offset, tuple(max(0, e - o) for o, e in zip(offset, end, strict=True)))


def relative(inner: Box, outer: Box) -> Box:
    """Return `inner`, which lies inside `outer`, in coordinates that start at `outer`'s corner."""
    return Box(tuple(i - o for i, o in zip(inner.offset, outer.offset, strict=True)), inner.shape)


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh axis that cuts a tensor dimension.

    Args:
        dim: the tensor dimension that is cut.
        index: this rank's coordinate on the mesh axis.
        count: size of the mesh axis.
        strided: product of the sizes of the axes to its right that cut the same dimension *before* it
            (`split_factor` of torch's `_StridedShard`); 1 for a plain cut.
    """

    dim: int
    index: int
    count: int
    strided: int = 1


def cut(lo: int, hi: int, *, index: int, count: int) -> tuple[int, int]:
    """Return part `index` of `[lo, hi)` cut into `count` parts of `ceil(length / count)`, as `torch.chunk` cuts."""
    step = -(-(hi - lo) // count)
    first = min(hi, lo + index * step)
    return first, min(hi, first + step)


def box_of_splits(shape: Sequence[int], splits: Sequence[Split]) -> Box:
    """Return the box that a rank holds after all `splits`, listed in order of the mesh axes.

    A tensor dimension is cut by one axis after the other. Plain cuts apply from left to right; a strided one applies
    after the axes to its right whose sizes multiply to its `strided` factor (FSDP2 over tensor parallelism:
    `torch/distributed/tensor/placement_types.py`, `_StridedShard`).

    Raises:
        ValueError: if a strided factor is no product of the sizes to its right, so that the shard is not one box.
    """
    offset, size = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        lo, hi = 0, shape[dim]
        for split in _cutting_order([s for s in splits if s.dim == dim]):
            lo, hi = cut(lo, hi, index=split.index, count=split.count)
        offset[dim], size[dim] = lo, hi - lo
    return Box(tuple(offset), tuple(size))


def _cutting_order(splits: list[Split]) -> list[Split]:
    order: list[Split] = []
    for position in range(len(splits) - 1, -1, -1):
        split, product, place = splits[position], 1, 0
        while product < split.strided and place < len(order):
            product *= order[place].count
            place += 1
        if product != split.strided:
            raise ValueError(f"a strided shard of factor {split.strided} is no box on axes {[s.count for s in splits]}")
        order.insert(place, split)
    return order


@dataclass(frozen=True, slots=True)
class Image:
    """The bytes of a box: contiguous in memory (C order), `rows` runs of `run_bytes` each in the tensor's file image.

    A byte of the packed image at `i` lies in run `i // run_bytes`; `spans` gives the place of every run.
    """

    box: Box
    shape: tuple[int, ...]
    itemsize: int
    run_bytes: int
    rows: int

    @property
    def total_bytes(self) -> int:
        return self.run_bytes * self.rows

    @property
    def is_contiguous(self) -> bool:
        return self.rows <= 1

    def spans(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """Yield `(offset in the tensor's bytes, offset in the packed image, length)` of packed bytes `[lo, hi)`."""
        position = lo
        while position < hi:
            row, inside = divmod(position, self.run_bytes)
            length = min(self.run_bytes - inside, hi - position)
            yield self._row_start(row) + inside, position, length
            position += length

    def _row_start(self, row: int) -> int:
        """Return the offset in the tensor's bytes of run `row`; runs count through the outer dimensions in C order."""
        element, stride = 0, 1
        outer = self._outer_dims()
        for dim in range(len(self.shape) - 1, -1, -1):
            at = self.box.offset[dim]
            if dim < outer:
                row, index = divmod(row, self.box.shape[dim])
                at += index
            element += at * stride
            stride *= self.shape[dim]
        return element * self.itemsize

    def _outer_dims(self) -> int:
        """Return how many leading dimensions are iterated over: those left of the contiguous run."""
        return _run_dim(self.box, self.shape)


def image(box: Box, shape: Sequence[int], itemsize: int) -> Image:
    """Describe the bytes of `box` in a C-ordered tensor of `shape`, with runs as long as they can be."""
    outer = _run_dim(box, tuple(shape))
    run = math.prod(box.shape[outer:]) * itemsize
    rows = math.prod(box.shape[:outer])
    if run * rows == 0:
        return Image(box, tuple(shape), itemsize, 0, 0)
    return Image(box, tuple(shape), itemsize, run, rows)


def _run_dim(box: Box, shape: Sequence[int]) -> int:
    """Return the first dimension of the trailing ones that together are one contiguous run of the tensor."""
    dim = len(shape)
    while dim > 0:
        dim -= 1
        if box.shape[dim] != shape[dim]:
            break
    else:
        return 0
    while dim > 0 and box.shape[dim - 1] == 1:
        dim -= 1
    return dim
