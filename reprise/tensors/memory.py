"""Live tensors' memory, on the host or a device, and page-aligned memory for bytes on their way to files."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reprise.errors import CheckpointError
from reprise.format.layout import PAGE_BYTES
from reprise.storage.worker import run_together

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14
# While one call populates pages, no thread in the process can map memory: a training step that allocates 50 MB waits.
# During a 768 MiB call an mmap took as long as that call, 0.09 to 2 s; during 8 MiB calls at most 2 ms.
_POPULATE_BYTES = 8 << 20
_POPULATE_THREADS = 8
PINNING = {"cuda"}  # devices whose runtime pins memory: CUDA or ROCm
_HUGE_BYTES = 2 << 20  # a huge page on x86-64, and on arm64 with 4 KiB pages


class Arena:
    """A block of host memory, handed out in slices in order and freed all at once.

    Not thread-safe: the caller serializes access.

    Args:
        total_bytes: The size in bytes. Unused pages take no physical memory until `touch`.
        is_pinned: Whether to pin the memory, so that copies from a CUDA device do not block the host.

    Attributes:
        is_touched: Whether its pages are populated, or queued for it.
    """

    def __init__(self, total_bytes: int, *, is_pinned: bool) -> None:
        self.total_bytes = total_bytes
        self._memory = map_memory(total_bytes)
        self._used = 0
        self._is_pinned = is_pinned and total_bytes > 0
        if self._is_pinned:
            # No thread can launch a kernel while memory is being pinned: 5.6 s for 19 GB on an H200's host, 0.4 s with
            # populated pages. Eight threads populate them in 0.8 s, and other threads launch kernels meanwhile.
            populate(self._memory, threads=min(_POPULATE_THREADS, len(os.sched_getaffinity(0))))
            pin(self._memory)
        self.is_touched = self._is_pinned or not total_bytes

    def take(self, size: int, *, offset: int) -> Bytes | None:
        """Return `size` bytes at an address congruent to a file's `offset` modulo a page; None if the arena is full.

        Extents adjacent in the file and taken in turn are adjacent in memory: a single O_DIRECT write covers them.
        """
        start = self._used + (offset - self._used) % PAGE_BYTES
        if start + size > self.total_bytes:
            return None
        self._used = start + size
        return self._memory[start : start + size]

    def clear(self) -> None:
        """Free all slices."""
        self._used = 0

    def touch(self) -> None:
        """Populate the pages, so that the first copy causes no page faults. Their contents stay."""
        populate(self._memory)

    def close(self) -> None:
        """Unpin the memory, and free it once no slice is left. The arena must not be used afterwards."""
        if self._is_pinned:
            _cudart().cudaHostUnregister(self._memory.ctypes.data)
            self._is_pinned = False
        self._memory, self.total_bytes = np.empty(0, np.uint8), 0


def populate(memory: Bytes, *, threads: int = 1) -> None:
    """Populate a mapping's pages. Linux before 5.14 refuses, and populates pages on first use.

    The last pages come first: a save that starts meanwhile copies from the front, and two threads faulting on one huge
    page would both clear it.
    """
    parts = [memory[at : at + _POPULATE_BYTES] for at in reversed(range(0, memory.nbytes, _POPULATE_BYTES))]
    run_together([functools.partial(_populate, part) for part in parts], name="checkpoint-populate", threads=threads)


def _populate(part: Bytes) -> None:
    _libc.madvise(ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(part.nbytes), _MADV_POPULATE_WRITE)


def map_memory(total_bytes: int) -> Bytes:
    """Return page-aligned zeros, on huge pages if the system provides them."""
    # A partial huge page at either end of a mapping would become small pages, with a fault each.
    pages = -(-total_bytes // _HUGE_BYTES) + 1 if total_bytes >= _HUGE_BYTES else 0
    # MAP_PRIVATE: a shared mapping, the default for mmap.mmap, gets only small pages.
    mapping = mmap.mmap(-1, pages * _HUGE_BYTES or max(total_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    start = -memory.ctypes.data % _HUGE_BYTES if pages else 0
    return memory[start : start + total_bytes]


def pin(memory: Bytes) -> None:
    """Pin memory for copies from a CUDA device.

    Raises:
        CheckpointError: The runtime refuses, for example because the host has no more memory.
    """
    result = int(_cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if result != 0:
        # The next kernel launch, whichever it is, would raise this call's error: launch one for it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise CheckpointError(
            "The staging memory cannot be pinned",
            found=f"CUDA error {result} for {memory.nbytes} B",
            fix="Lower staging_bytes.",
        )


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Memory:
    """A box's packed image on the host, or on an accelerator.

    Args:
        packed: The image.
        is_private: Whether this is a constant copy.
    """

    def __init__(self, packed: torch.Tensor, *, is_private: bool) -> None:
        self.bytes = packed.reshape(-1).view(torch.uint8)  # keeps the memory alive
        self.total_bytes = packed.nbytes
        self.is_on_device = packed.device.type != "cpu"
        self.is_private = is_private and not self.is_on_device
        self.address = 0 if self.is_on_device else packed.data_ptr()

    def copy_to(self, target: Bytes, lo: int) -> torch.Event | None:
        """Copy bytes starting at `lo`. From a device, only start, and return the event recorded after the copy."""
        if not self.is_on_device:  # without torch, because the training step needs torch's threads
            ctypes.memmove(target.ctypes.data, self.address + lo, target.nbytes)
            return None
        stream = _copy_stream(self.bytes.device)
        with torch.get_device_module(self.bytes.device).stream(stream):  # a stream's own context is shared
            torch.from_numpy(target).copy_(self.bytes[lo : lo + target.nbytes], non_blocking=True)
            return stream.record_event()


def await_training(devices: Iterable[torch.device]) -> None:
    """Order later copies from these devices after the work launched so far. Call it on the main thread."""
    for device in devices:
        _copy_stream(device).wait_stream(torch.get_device_module(device).current_stream(device))


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """Return the stream for all copies from a device, not training's. They end in order, also into the same memory."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream
