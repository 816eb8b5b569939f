"""Scattered bytes of a file arrive in contiguous memory, and in live tensors of any strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.format.box import Box, Image, image, in_bytes, whole
from reprise.format.layout import TensorKind, TensorSpec
from reprise.loading.loader import Target
from reprise.loading.reader import Bytes, Gatherer
from reprise.tensors.dtypes import stored_dtype
from reprise.tensors.live import LiveTensor
from tests.profiles import examples

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


@examples(500)
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


VALUES = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def target_of(local: torch.Tensor, box: Box) -> Target:
    spec = TensorSpec(TensorKind.MODEL, "t", (8, 9), stored_dtype(local.dtype, where="t"), (8, 9))
    return Target(LiveTensor(spec, box, local, (0,)), box)


def bytes_of(values: torch.Tensor) -> np.ndarray:
    packed = values.contiguous()
    return packed.reshape(-1).view(torch.uint8).numpy().reshape(*values.shape, packed.element_size())


@pytest.mark.parametrize(
    ("shape", "box", "gap_bytes", "scratch_bytes", "sizes"),
    [
        ((100, 16), Box((0, 4), (100, 8)), 8, 10 * 16, [9 * 16 + 8] * 10),  # narrow gaps, up to the size of the buffer
        ((3, 10, 8), Box((0, 0, 0), (3, 5, 4)), 10, 1 << 10, [4 * 8 + 4] * 3),  # wide gaps between narrow ones
        ((5, 9), Box((0, 0), (5, 8)), 9, 7, [8] * 5),  # runs that are longer than the buffer
    ],
)
def test_narrow_gaps_are_read_along_and_wide_ones_left_out(
    shape: tuple[int, ...], box: Box, gap_bytes: int, scratch_bytes: int, sizes: list[int]
) -> None:
    memory = Memory(tensor_of(shape, 1))
    source = image(box, shape, 1)
    gathered(memory, source, 0, source.total_bytes, gap_bytes=gap_bytes, scratch_bytes=scratch_bytes)
    assert [size for _, size in memory.reads] == sizes


@pytest.mark.parametrize(
    "local", [torch.zeros(4, 6), torch.zeros(6, 4).T, torch.zeros(4, 12)[:, ::2], torch.zeros(9, 8)[3:7, 1:7]]
)
def test_parts_that_are_put_are_in_the_live_tensor(local: torch.Tensor) -> None:
    box = Box((2, 3), (4, 6))
    target = target_of(local, box)
    for part in (Box((2, 3), (4, 2)), Box((2, 5), (1, 4)), Box((3, 5), (3, 4))):
        inner = tuple(slice(o - b, o - b + n) for o, b, n in zip(part.offset, box.offset, part.shape, strict=True))
        target.put(in_bytes(part, 4), bytes_of(VALUES[inner]))
    target.finish()
    assert torch.equal(local, VALUES)


def test_memory_is_given_where_a_part_is_packed_in_it() -> None:
    target = target_of(torch.zeros(4, 6), Box((2, 3), (4, 6)))
    rows = target.memory(in_bytes(Box((3, 3), (2, 6)), 4))
    assert rows is not None
    rows[:] = bytes_of(VALUES[1:3]).reshape(-1)
    assert torch.equal(target.tensor.local[1:3], VALUES[1:3])
    assert not target.tensor.local[0].any()
    assert target.memory(in_bytes(Box((3, 3), (2, 5)), 4)) is None
    assert target_of(torch.zeros(6, 4).T, Box((0, 0), (4, 6))).memory(in_bytes(whole((4, 6)), 4)) is None
