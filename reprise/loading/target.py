"""The destination of a loaded box: the memory of a live tensor, on the host or on a device."""

from __future__ import annotations

import numpy as np
import torch

from reprise.format.box import Box, in_bytes, relative
from reprise.loading.gather import Bytes
from reprise.tensors.live import LiveTensor


class Target:
    """The memory of a live tensor, byte by byte. Threads may fill disjoint parts of it.

    Args:
        box: the tensor's box in the dimensions in which it was written.
    """

    def __init__(self, tensor: LiveTensor, box: Box) -> None:
        self.tensor = tensor
        self.box = in_bytes(box, tensor.local.element_size())
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
