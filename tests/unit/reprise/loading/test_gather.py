"""Bytes that lie apart are gathered to what numpy takes out, and little is read that is not wanted."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.format.box import Box, Image, image
from reprise.loading.gather import Bytes, Gatherer

OFFSET = 5


class Memory:
    """A file in memory that writes down what is read: (offset, size)."""

    def __init__(self, tensor: Bytes) -> None:
        self.data = bytes(OFFSET) + tensor.tobytes()
        self.reads: list[tuple[int, int]] = []

    def read(self, buffer: memoryview, offset: int) -> None:
        found = self.data[offset : offset + buffer.nbytes]
        assert len(found) == buffer.nbytes
        self.reads.append((offset, buffer.nbytes))
        buffer[:] = found


@st.composite
def sources(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, int]:
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple))
    ends = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(1, n)))) for n in shape]
    box = Box(tuple(lo for lo, _ in ends), tuple(max(1, hi - lo) for lo, hi in ends))
    return shape, box, draw(st.sampled_from([1, 2, 4]))


def tensor_of(shape: tuple[int, ...], itemsize: int) -> Bytes:
    generator = np.random.default_rng(1)
    return generator.integers(0, 256, (*shape, itemsize), dtype=np.uint8)


def gathered(memory: Memory, source: Image, lo: int, hi: int, *, gap_bytes: int, scratch_bytes: int) -> Bytes:
    into = np.zeros(hi - lo, dtype=np.uint8)
    gatherer = Gatherer(gap_bytes=gap_bytes, scratch_bytes=scratch_bytes)
    gatherer.gather(memory.read, source, lo, into, offset=OFFSET)
    return into


@settings(deadline=None, max_examples=500)
@given(sources(), st.integers(0, 40), st.integers(1, 40), st.data())
def test_an_extent_of_a_box_is_gathered_to_numpy_s_bytes(
    case: tuple[tuple[int, ...], Box, int], gap_bytes: int, scratch_bytes: int, data: st.DataObject
) -> None:
    shape, box, itemsize = case
    tensor = tensor_of(shape, itemsize)
    packed = tensor[box.slices].flatten()
    lo, hi = sorted((data.draw(st.integers(0, packed.size)), data.draw(st.integers(0, packed.size))))
    source, memory = image(box, shape, itemsize), Memory(tensor)
    found = gathered(memory, source, lo, hi, gap_bytes=gap_bytes, scratch_bytes=scratch_bytes)
    assert np.array_equal(found, packed[lo:hi])
    runs = len(list(source.spans(lo, hi)))
    assert sum(size for _, size in memory.reads) <= hi - lo + gap_bytes * max(0, runs - 1)
    assert len(memory.reads) <= max(1, runs)


@settings(deadline=None, max_examples=100)
@given(sources())
def test_where_no_gap_is_read_along_every_byte_read_is_wanted(case: tuple[tuple[int, ...], Box, int]) -> None:
    shape, box, itemsize = case
    source, memory = image(box, shape, itemsize), Memory(tensor_of(shape, itemsize))
    gathered(memory, source, 0, source.total_bytes, gap_bytes=0, scratch_bytes=1 << 10)
    assert [(at - OFFSET, size) for at, size in memory.reads] == [
        (at, size) for at, _, size in source.spans(0, source.total_bytes)
    ]


def test_narrow_gaps_are_read_along_up_to_the_buffer_size() -> None:
    shape, box = (100, 16), Box((0, 4), (100, 8))
    memory = Memory(tensor_of(shape, 1))
    gathered(memory, image(box, shape, 1), 0, 800, gap_bytes=8, scratch_bytes=10 * 16)
    assert [size for _, size in memory.reads] == [9 * 16 + 8] * 10


def test_wide_gaps_between_blocks_of_narrow_ones_are_left_out() -> None:
    shape, box = (3, 10, 8), Box((0, 0, 0), (3, 5, 4))
    memory = Memory(tensor_of(shape, 1))
    gathered(memory, image(box, shape, 1), 0, math.prod(box.shape), gap_bytes=10, scratch_bytes=1 << 10)
    assert memory.reads == [(OFFSET + 80 * block, 4 * 8 + 4) for block in range(3)]


def test_runs_longer_than_the_buffer_are_read_one_by_one() -> None:
    shape, box = (5, 9), Box((0, 0), (5, 8))
    tensor = tensor_of(shape, 1)
    memory = Memory(tensor)
    found = gathered(memory, image(box, shape, 1), 0, 40, gap_bytes=9, scratch_bytes=7)
    assert np.array_equal(found, tensor[box.slices].flatten())
    assert memory.reads == [(OFFSET + 9 * row, 8) for row in range(5)]
