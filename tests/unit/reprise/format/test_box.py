"""Boxes against brute force: every element in exactly one, and every byte where numpy says it is."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from reprise.format.box import Box, Split, box_of_splits, extent, image, intersect, relative
from tests.profiles import examples

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(lo for lo, _ in ends), tuple(hi - lo for lo, hi in ends))


@st.composite
def shapes_with_boxes(draw: st.DrawFn, count: int = 1) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, [draw(boxes(shape)) for _ in range(count)]


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int], list[int]]:
    """Draw a shape and mesh axes: the size of each, the dimension it cuts, and the order in which they cut."""
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = [draw(st.integers(0, len(shape) - 1)) for _ in sizes]
    order = draw(st.permutations(range(len(sizes))))
    return shape, sizes, dims, list(order)


def strided_factors(sizes: list[int], dims: list[int], order: list[int]) -> list[int]:
    """Return each axis' factor: the sizes, multiplied, of the axes to its right that cut its dimension before it."""
    return [
        math.prod(sizes[b] for b in range(a + 1, len(sizes)) if dims[b] == dims[a] and order.index(b) < order.index(a))
        for a in range(len(sizes))
    ]


@examples(300)
@given(meshes())
@example(((13,), [2, 3, 2], [0, 0, 0], [2, 1, 0]))
def test_box_of_splits_equals_cutting_axis_by_axis(
    mesh: tuple[tuple[int, ...], list[int], list[int], list[int]],
) -> None:
    shape, sizes, dims, order = mesh
    factors = strided_factors(sizes, dims, order)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    seen: Counter[int] = Counter()
    for coordinate in itertools.product(*(range(size) for size in sizes)):
        part = numbers
        for axis in order:
            chunks = part.chunk(sizes[axis], dim=dims[axis]) if part.shape[dims[axis]] else ()
            empty = part.narrow(dims[axis], 0, 0)
            part = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else empty
        splits = [
            Split(dim, index, size, factor)
            for dim, index, size, factor in zip(dims, coordinate, sizes, factors, strict=True)
        ]
        box = box_of_splits(shape, splits)
        assert numbers[box.slices].flatten().tolist() == part.flatten().tolist()
        seen.update(part.flatten().tolist())
    assert seen == Counter(range(math.prod(shape)))


def test_box_of_splits_refuses_a_factor_no_axes_multiply_to() -> None:
    with pytest.raises(ValueError, match="factor 3 is not a box"):
        box_of_splits((12,), [Split(0, 0, 2, strided=3), Split(0, 0, 2)])
    with pytest.raises(ValueError, match="factor 2 is not a box"):
        box_of_splits((12,), [Split(0, 0, 2, strided=2)])


@given(shapes_with_boxes(count=2))
def test_intersect_is_the_set_of_common_elements(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    common = intersect(a, b)
    in_a, in_b = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    in_a[a.slices] = in_b[b.slices] = True
    both = np.asarray(in_a & in_b)
    assert common.numel == both.sum()
    if common.numel:
        assert both[common.slices].all()
        inner = relative(common, a)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        assert np.array_equal(numbers[a.slices][inner.slices], numbers[common.slices])


@examples(300)
@given(shapes_with_boxes(), st.sampled_from([1, 2, 8]), st.data())
def test_image_spans_are_where_numpy_puts_the_bytes(
    case: tuple[tuple[int, ...], list[Box]], itemsize: int, data: st.DataObject
) -> None:
    shape, (box,) = case
    total = math.prod(shape) * itemsize
    numbers = np.arange(total).reshape(*shape, itemsize)
    packed = numbers[box.slices].flatten()
    found = image(box, shape, itemsize)
    assert found.total_bytes == packed.size
    assert found.is_contiguous == bool((np.diff(packed) == 1).all())
    starts = [found.start]
    for count, stride in found.loops:
        starts = [start + index * stride for start in starts for index in range(count)]
    assert [start + at for start in starts for at in range(found.run_bytes)] == packed.tolist()
    assert not packed.size or found.extent == packed[-1] - packed[0] + 1
    offsets = range(-2, total + 3)
    assert [found.before(offset) for offset in offsets] == np.searchsorted(packed, offsets).tolist()
    lo, hi = sorted((data.draw(st.integers(0, packed.size)), data.draw(st.integers(0, packed.size))))
    position = lo
    for in_tensor, in_image, length in found.spans(lo, hi):
        assert in_image == position
        assert length > 0
        assert np.array_equal(np.arange(in_tensor, in_tensor + length), packed[in_image : in_image + length])
        position += length
    assert position == hi


@examples(300)
@given(shapes.filter(len), st.data())
def test_extent_gives_boxes_that_are_the_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    lo, hi = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    numbers = np.arange(total).reshape(shape)
    found = list(extent(shape, lo, hi))
    assert [int(n) for box in found for n in numbers[box.slices].flatten()] == list(range(lo, hi))
    assert len(found) <= 2 * len(shape) - 1
    assert all(box.numel for box in found)
