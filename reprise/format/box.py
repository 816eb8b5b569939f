"""Boxes: rectangles within a tensor, and the bytes they occupy. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open rectangle `[offset, offset + shape)` within a tensor, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the slices selecting the box in an array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """Return the box covering a whole tensor of shape `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes within a tensor; its `numel` is 0 if they are disjoint."""
    if a == b:
        return a
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    end = tuple(min(x, y) for x, y in zip(a.end, b.end, strict=True))
    return Box(offset, tuple(max(0, e - o) for o, e in zip(offset, end, strict=True)))


def relative(inner: Box, outer: Box) -> Box:
    """Return `inner` in coordinates relative to `outer`'s corner."""
    return Box(tuple(i - o for i, o in zip(inner.offset, outer.offset, strict=True)), inner.shape)


def in_bytes(box: Box, itemsize: int) -> Box:
    """Return the box with a further dimension for each item's bytes."""
    return Box((*box.offset, 0), (*box.shape, itemsize))


@dataclass(frozen=True, slots=True)
class Split:
    """A mesh axis with a tensor dimension sharded over it.

    Args:
        dim: The sharded tensor dimension.
        index: This rank's coordinate on the mesh axis.
        count: The mesh axis size.
        strided: The product of the sizes of the axes to the right that shard the dimension *before* this axis
            (torch's `_StridedShard.split_factor`). 1 for a plain shard.
    """

    dim: int
    index: int
    count: int
    strided: int = 1


def cut(lo: int, hi: int, *, index: int, count: int) -> tuple[int, int]:
    """Return part `index` when `[lo, hi)` is cut into `count` parts with `ceil(length / count)` items each, as in
    `torch.chunk`."""
    step = -(-(hi - lo) // count)
    first = min(hi, lo + index * step)
    return first, min(hi, first + step)


def box_of_splits(shape: Sequence[int], splits: Sequence[Split]) -> Box:
    """Return a rank's box after all `splits`, listed in mesh axis order.

    Plain splits apply from left to right. A strided split applies after the axes to its right whose sizes multiply to
    its `strided` factor (FSDP2 over tensor parallelism: `torch/distributed/tensor/placement_types.py`,
    `_StridedShard`).

    Raises:
        ValueError: A strided factor is not a product of sizes to its right, so the shard is not a single box.
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
            raise ValueError(
                f"a strided shard of factor {split.strided} is not a box on axes {[s.count for s in splits]}"
            )
        order.insert(place, split)
    return order


@dataclass(frozen=True, slots=True)
class Image:
    """A box's bytes: contiguous in memory (C order), runs of `run_bytes` each in the tensor's file image.

    Args:
        start: The first run's offset in the tensor's bytes.
        loops: `(count, stride in bytes)` for the runs, from the outermost loop to the innermost. Empty for a single
            run. Adjacent loops are merged where possible.
    """

    box: Box
    start: int
    loops: tuple[tuple[int, int], ...]
    run_bytes: int

    @property
    def total_bytes(self) -> int:
        return math.prod(self.packed_shape)

    @property
    def extent(self) -> int:
        """Return the distance in bytes from its first byte to its last in the tensor, both included."""
        return covered_bytes(self.packed_shape, self.strides)

    @property
    def is_contiguous(self) -> bool:
        return not self.loops

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Return the packed image's shape as an array of bytes: a dimension per loop, and the run's."""
        return (*(count for count, _ in self.loops), self.run_bytes)

    def before(self, offset: int) -> int:
        """Count its bytes before the tensor's byte `offset`."""
        remaining, step, packed = offset - self.start, self.total_bytes, 0
        for count, stride in self.loops:
            step //= count
            index = max(0, remaining // stride)
            if index >= count:
                return packed + count * step
            packed += index * step
            remaining -= index * stride
        return packed + min(max(0, remaining), self.run_bytes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the packed image dimensions' strides, in bytes within the tensor."""
        return (*(stride for _, stride in self.loops), 1)

    def boxes(self, lo: int, hi: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yield packed bytes `[lo, hi)` as the fewest arrays with strides `strides` in the tensor.

        Each is a shape, its first byte's offset in the tensor, and its offset in the packed image.
        """
        strides, at = self.strides, lo
        for box in extent(self.packed_shape, lo, hi):
            yield box.shape, self.start + sum(map(operator.mul, box.offset, strides)), at
            at += box.numel

    def spans(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """Yield `(offset in the tensor's bytes, offset in the packed image, length)` for packed bytes `[lo, hi)`."""
        strides = self.strides
        for shape, start, at in self.boxes(lo, hi):
            for number, index in enumerate(itertools.product(*map(range, shape[:-1]))):
                yield start + sum(map(operator.mul, index, strides)), at + number * shape[-1], shape[-1]


def covered_bytes(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the distance in bytes from an array's first byte to its last, both included."""
    return 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))


def image(box: Box, shape: Sequence[int], itemsize: int) -> Image:
    """Return the image of `box` in a C-ordered tensor shaped `shape`, with runs as long as possible."""
    if 0 in box.shape:
        return Image(box, 0, (), 0)
    run = stride = itemsize
    start, loops = 0, list[tuple[int, int]]()  # the innermost first
    for offset, count, size in zip(reversed(box.offset), reversed(box.shape), reversed(shape), strict=True):
        start += offset * stride
        if count > 1:
            if loops and stride == loops[-1][0] * loops[-1][1]:
                loops[-1] = (loops[-1][0] * count, loops[-1][1])
            elif loops or stride != run:
                loops.append((count, stride))
            else:
                run *= count
        stride *= size
    return Image(box, start, tuple(reversed(loops)), run)


def extent(shape: Sequence[int], lo: int, hi: int) -> Iterator[Box]:
    """Yield the fewest boxes covering elements `[lo, hi)` in a C-ordered array shaped `shape`, in order.

    There are at most 2 * dimensions - 1. The array has at least one dimension.
    """
    sizes = [math.prod(shape[dim:]) for dim in range(1, len(shape) + 1)]  # of one index's elements, by dimension
    while lo < hi:
        dim = next(dim for dim, size in enumerate(sizes) if lo % size == 0 and size <= hi - lo)
        offset = tuple(lo // size % count for size, count in zip(sizes, shape, strict=True))
        count = min(shape[dim] - offset[dim], (hi - lo) // sizes[dim])
        yield Box(offset, (*(1 for _ in shape[:dim]), count, *shape[dim + 1 :]))
        lo += count * sizes[dim]
