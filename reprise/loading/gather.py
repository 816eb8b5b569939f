"""Gathers scattered bytes of a file, in few reads, into contiguous memory and the memory of live tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from reprise.format.box import Box, Image, in_bytes, relative
from reprise.tensors.live import LiveTensor

Bytes = npt.NDArray[np.uint8]
Read = Callable[[memoryview, int], None]  # fills a buffer from an offset in the file

# Gaps up to this size are read and discarded. With two threads on warm files, one call per run cost as much as reading
# 50 KB more (runs of 2 to 28 KB; 3 to 9 times as long for the runs of tensor parallelism in GPT-2). Ranks of one host
# read each other's runs from the page cache.
GAP_BYTES = 32 << 10
# Bytes per read with gaps: small enough to stay in the processor's cache until they are copied.
SCRATCH_BYTES = 2 << 20


class Gatherer:
    """Reads packed images from their scattered positions, through a buffer of its own; each thread needs its own."""

    def __init__(self, *, gap_bytes: int = GAP_BYTES, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self._gap_bytes = gap_bytes
        self._scratch: Bytes = np.empty(scratch_bytes, dtype=np.uint8)

    def gather(self, read: Read, source: Image, lo: int, into: Bytes, *, offset: int) -> None:
        """Fill `into` with bytes of the packed image `source`, from `lo` on; its tensor begins at `offset`."""
        if source.is_contiguous:
            read(into.data, offset + source.start + lo)
            return
        for shape, start, at in source.boxes(lo, lo + into.size):
            part = into[at - lo : at - lo + math.prod(shape)].reshape(shape)
            self._cover(read, offset + start, source.strides, part)

    def _cover(self, read: Read, start: int, strides: Sequence[int], into: Bytes) -> None:
        """Fill the C-ordered array `into` from the bytes at `start` with `strides`, the last of which is 1."""
        if into.ndim == 1:
            read(into.data, start)
            return
        count, stride = len(into), strides[0]
        length = _extent(into.shape[1:], strides[1:])
        if stride - length > self._gap_bytes or length > self._scratch.size or count == 1:
            for index in range(count):
                self._cover(read, start + index * stride, strides[1:], into[index])
            return
        most = 1 + (self._scratch.size - length) // stride
        for first in range(0, count, most):
            part = into[first : first + most]
            covering = self._scratch[: (len(part) - 1) * stride + length]
            read(covering.data, start + first * stride)
            np.copyto(part, np.ndarray(part.shape, np.uint8, covering, 0, strides))


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the distance in bytes from the first byte of an array to its last, both included."""
    return 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))


class Target:
    """The memory of a live tensor, byte by byte. Threads may fill disjoint parts of it.

    Args:
        box: the tensor's box in the dimensions in which it was written.
    """

    def __init__(self, tensor: LiveTensor, box: Box) -> None:
        self.tensor = tensor
        self.elements, self.box = box, in_bytes(box, tensor.local.element_size())
        self._staging: torch.Tensor | None = None
        local = tensor.local.detach()
        if (
            not local.is_contiguous() and tuple(local.shape) != box.shape
        ):  # its strides may not be expressible in those dimensions
            local = self._staging = torch.empty(box.shape, dtype=local.dtype)
        self._memory = _bytes_of(local, self.box.shape)
        self._array: Bytes | None = self._memory.numpy() if self._memory.device.type == "cpu" else None

    def memory(self, part: Box) -> Bytes | None:
        """Return the memory of `part` if the host can write to it and it is contiguous, otherwise None."""
        if self._array is None:
            return None
        array = self._array if part == self.box else self._array[relative(part, self.box).slices]
        return array.reshape(-1) if array.flags.c_contiguous else None

    def put(self, part: Box, data: Bytes) -> None:
        """Copy `data` to `part`."""
        index = relative(part, self.box).slices
        if self._array is not None:
            np.copyto(self._array[index], data)
        else:
            self._memory[index].copy_(torch.from_numpy(np.ascontiguousarray(data)))

    def finish(self) -> None:
        """Copy staged data to its destination, once all of it has arrived."""
        if self._staging is not None:
            with torch.no_grad():
                self.tensor.local.copy_(self._staging.reshape(self.tensor.local.shape))


def _bytes_of(local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the bytes of a tensor, in its own memory, as `shape`, whose last dimension is the bytes of an item."""
    size = local.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=local.device)
    strides = (*(stride * size for stride in local.stride()), 1)
    memory.set_(local.untyped_storage(), local.storage_offset() * size, (*local.shape, size), strides)
    return memory.view(shape)
