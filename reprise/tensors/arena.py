"""Page-aligned host memory for staging bytes on their way to files."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reprise.errors import CheckpointError
from reprise.format.layout import PAGE_BYTES

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14
# While one call populates, no thread of the process can map memory: a training step that allocates 50 MB waits for it.
# Beside 768 MiB in one call an mmap took as long as that call, 0.09 to 2 s; beside 8 MiB at a time, at most 2 ms.
_POPULATE_BYTES = 8 << 20


class Arena:
    """A block of host memory, handed out in slices in order and freed all at once.

    Not thread-safe; the caller serializes access.

    Args:
        total_bytes: the size in bytes; unused pages take no physical memory until `touch`.
        is_pinned: pin the memory: copies from a CUDA device then do not block the host.
    """

    def __init__(self, total_bytes: int, *, is_pinned: bool) -> None:
        self.total_bytes = total_bytes
        self._memory = map_memory(total_bytes)
        self._used = 0
        self._is_pinned = is_pinned and total_bytes > 0
        if self._is_pinned:
            pin(self._memory)

    def take(self, size: int, *, offset: int) -> Bytes | None:
        """Return `size` bytes at an address congruent to a file's `offset` modulo a page; None if the arena is full."""
        start = self._used + (offset - self._used) % PAGE_BYTES
        if start + size > self.total_bytes:
            return None
        self._used = start + size
        return self._memory[start : start + size]

    def clear(self) -> None:
        """Free all slices."""
        self._used = 0

    def touch(self) -> None:
        """Populate the pages, to spare the first copy into them the faults. Their contents are kept."""
        if not self._is_pinned:
            populate(self._memory)

    def close(self) -> None:
        """Unpin the memory, and free it once no slice of it is left. The arena must not be used afterwards."""
        if self._is_pinned:
            _cudart().cudaHostUnregister(self._memory.ctypes.data)
            self._is_pinned = False
        self._memory, self.total_bytes = np.empty(0, np.uint8), 0


def populate(memory: Bytes) -> None:
    """Populate the pages of a mapping. Kernels before 5.14 refuse; pages are then populated on first use."""
    for at in range(0, memory.nbytes, _POPULATE_BYTES):
        part = memory[at : at + _POPULATE_BYTES]
        _libc.madvise(ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(part.nbytes), _MADV_POPULATE_WRITE)


def map_memory(total_bytes: int) -> Bytes:
    """Return page-aligned zeros, on huge pages where the system provides them."""
    # MAP_PRIVATE: a shared mapping, the default of mmap.mmap, gets small pages only.
    mapping = mmap.mmap(-1, max(total_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)[:total_bytes]


def map_like_file(extents: Sequence[tuple[int, int]]) -> list[Bytes]:
    """Return zeros for extents `(offset, size)` of a file, at addresses congruent to the offsets modulo a page.

    Extents adjacent in the file and in the list are adjacent in memory: a single O_DIRECT write covers them.
    """
    starts, end = [], 0
    for offset, size in extents:
        starts.append(end + (offset - end) % PAGE_BYTES)
        end = starts[-1] + size
    memory = map_memory(end)
    return [memory[start : start + size] for start, (_, size) in zip(starts, extents, strict=True)]


def pin(memory: Bytes) -> None:
    """Pin memory for copies from a CUDA device.

    Raises:
        CheckpointError: if the runtime refuses, as where the host has no more memory.
    """
    result = int(_cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if result != 0:
        # The next launch of a kernel, whichever it is, would raise the error of this call: launch one for it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise CheckpointError(
            "The staging memory cannot be pinned",
            found=f"CUDA error {result} for {memory.nbytes} B",
            fix="Lower staging_bytes.",
        )


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
