"""Scattered bytes of a file arrive in contiguous memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.format.box import Box, Image, image
from reprise.loading import reader
from reprise.loading.reader import Bytes, OpenFile
from reprise.storage.files import FILE_SYSTEM
from tests.profiles import examples
from tests.unit.reprise.format.test_box import shapes_with_boxes

OFFSET = 5


class Memory(OpenFile):
    """A file in memory that writes down what is read: (offset, size)."""

    def __init__(self, tensor: Bytes) -> None:
        super().__init__(FILE_SYSTEM, Path("a"), 0)
        self.data = bytes(OFFSET) + tensor.tobytes()
        self.reads: list[tuple[int, int]] = []

    def read(self, buffer: memoryview, offset: int) -> None:
        found = self.data[offset : offset + buffer.nbytes]
        assert len(found) == buffer.nbytes
        self.reads.append((offset, buffer.nbytes))
        buffer[:] = found


def tensor_of(shape: tuple[int, ...], itemsize: int) -> Bytes:
    generator = np.random.default_rng(1)
    return generator.integers(0, 256, (*shape, itemsize), dtype=np.uint8)


def gathered(
    tensor: Bytes, source: Image, lo: int, hi: int, *, gap_bytes: int, scratch_bytes: int
) -> tuple[Bytes, list[tuple[int, int]]]:
    """Return an extent of an image, and what was read for it."""
    into = np.zeros(hi - lo, dtype=np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "GAP_BYTES", gap_bytes)
        patch.setattr(reader, "SCRATCH_BYTES", scratch_bytes)
        memory = Memory(tensor)
        memory.gather(source, lo, into, offset=OFFSET)
    return into, memory.reads


@examples(500)
@given(shapes_with_boxes(), st.sampled_from([1, 2, 4]), st.integers(0, 40), st.integers(1, 40), st.data())
def test_an_extent_of_a_box_is_gathered_to_numpy_s_bytes(
    case: tuple[tuple[int, ...], list[Box]], itemsize: int, gap_bytes: int, scratch_bytes: int, data: st.DataObject
) -> None:
    shape, (box,) = case
    tensor = tensor_of(shape, itemsize)
    packed = tensor[box.slices].flatten()
    lo, hi = sorted((data.draw(st.integers(0, packed.size)), data.draw(st.integers(0, packed.size))))
    source = image(box, shape, itemsize)
    filled, reads = gathered(tensor, source, lo, hi, gap_bytes=gap_bytes, scratch_bytes=scratch_bytes)
    assert np.array_equal(filled, packed[lo:hi])
    runs = len(list(source.spans(lo, hi)))
    assert sum(size for _, size in reads) <= hi - lo + gap_bytes * max(0, runs - 1)
    assert len(reads) <= max(1, runs)


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
    tensor, source = tensor_of(shape, 1), image(box, shape, 1)
    _, reads = gathered(tensor, source, 0, source.total_bytes, gap_bytes=gap_bytes, scratch_bytes=scratch_bytes)
    assert [size for _, size in reads] == sizes
