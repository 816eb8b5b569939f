"""Copies of tensors from host memory; memory on page-aligned ground, at addresses congruent to file offsets."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import numpy.ctypeslib
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from reprise.format.layout import PAGE_BYTES
from reprise.tensors.memory import Arena, Bytes, Memory, map_memory

STRETCHES = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 20_000)), max_size=12)


@given(STRETCHES)
@example([(5000, 3), (5003, 9000), (14_003, 1)])
def test_an_arena_s_memory_is_congruent_and_keeps_adjacency(extents: list[tuple[int, int]]) -> None:
    arena = Arena(sum(size + PAGE_BYTES for _, size in extents), is_pinned=False)
    arena.touch()
    taken = []
    for number, (offset, size) in enumerate(extents):
        memory = arena.take(size, offset=offset)
        assert memory is not None
        assert memory.nbytes == size
        assert (memory.ctypes.data - offset) % PAGE_BYTES == 0
        memory[:] = number
        taken.append(memory)
    assert all((memory == number).all() for number, memory in enumerate(taken))
    ends = zip(extents, taken, extents[1:], taken[1:], strict=False)
    for (offset, size), memory, (next_offset, _), next_memory in ends:
        if next_offset == offset + size:
            assert next_memory.ctypes.data == memory.ctypes.data + size


def test_touching_keeps_what_is_there() -> None:
    arena = Arena(10_000, is_pinned=False)
    memory = arena.take(9_000, offset=0)
    assert memory is not None
    memory[:] = 7
    assert arena.take(2_000, offset=0) is None
    arena.touch()
    assert (memory == 7).all()
    arena.clear()
    assert arena.take(2_000, offset=0) is not None
    arena.close()


def test_memory_is_private_and_aligned_for_huge_pages() -> None:
    memory, huge_bytes = map_memory((4 << 20) + PAGE_BYTES), 2 << 20
    at = memory.ctypes.data
    assert at % huge_bytes == 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= at < last:
            assert rights == "rw-p"
            assert at + 3 * huge_bytes <= last
            return
    raise AssertionError("it is mapped nowhere")


def test_a_copy_needs_no_attribute_that_numpy_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another thread imports `numpy.ctypeslib` and has not yet added it to numpy, the attribute recurses."""
    monkeypatch.delattr(numpy, "ctypeslib")
    with pytest.raises(RecursionError):
        _ = np.ctypeslib
    source = torch.arange(100, dtype=torch.uint8)
    target = np.zeros(40, dtype=np.uint8)
    Memory(source, is_private=True).copy_to(target, 30)
    assert target.tolist() == list(range(30, 70))


def test_memory_has_its_pages_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning makes them itself otherwise, and the device runs nothing new meanwhile."""
    pages_there = []

    def pin(mapping: Bytes) -> None:
        flags = np.zeros(-(-mapping.nbytes // mmap.PAGESIZE), np.uint8)
        address, size = ctypes.c_void_p(mapping.ctypes.data), ctypes.c_size_t(mapping.nbytes)
        assert ctypes.CDLL(None).mincore(address, size, ctypes.c_void_p(flags.ctypes.data)) == 0
        pages_there.append(bool(flags.all()))

    monkeypatch.setattr("reprise.tensors.memory.pin", pin)
    Arena(40 << 20, is_pinned=True)
    assert pages_there == [True]
