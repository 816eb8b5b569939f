"""The source of the bytes of live tensors, in host or device memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Sequence

import torch

from reprise.tensors.arena import Bytes
from reprise.tensors.live import LiveTensor


class HostMemory:
    """The packed image of a box on the host; `is_private` marks an unchanging copy."""

    is_on_device = False

    def __init__(self, packed: torch.Tensor, *, is_private: bool) -> None:
        self._packed = packed  # keeps the memory
        self.address = packed.data_ptr()
        self.total_bytes = packed.nbytes
        self.is_private = is_private

    def copy_to(self, target: Bytes, lo: int) -> torch.Event | None:
        """Copy bytes from `lo` on without torch, because the training step needs torch's threads."""
        ctypes.memmove(target.ctypes.data, self.address + lo, target.nbytes)
        return None


class DeviceMemory:
    """The packed image of a box on an accelerator, copied on a stream other than training's."""

    is_on_device = True
    is_private = False
    address = 0

    def __init__(self, packed: torch.Tensor, stream: torch.Stream) -> None:
        self.bytes = packed.reshape(-1).view(torch.uint8)
        self._stream = stream
        self.total_bytes = self.bytes.numel()

    def copy_to(self, target: Bytes, lo: int) -> torch.Event | None:
        """Start copying bytes from `lo` on; return the event recorded after the copy."""
        with torch.get_device_module(self.bytes.device).stream(self._stream):  # a stream's own context is no thread's
            torch.from_numpy(target).copy_(self.bytes[lo : lo + target.nbytes], non_blocking=True)
            return self._stream.record_event()


Memory = HostMemory | DeviceMemory


class Sources:
    """The memory of repeatedly saved tensors, without copying where possible.

    Args:
        steady: addresses of the storages with changes at known times only; None for all. Tensors in other storages, and
            non-contiguous tensors, are copied at every `begin`.
    """

    def __init__(self, live: Sequence[LiveTensor], steady: Collection[int] | None) -> None:
        devices = [tensor.local.device for tensor in live if tensor.local.device.type != "cpu"]
        self._device = devices[0] if devices else None
        self._stream = None if self._device is None else _copy_stream(self._device)
        self._steady: dict[str, Memory] = {}
        self._copied: list[LiveTensor] = []
        for tensor in live:
            local = tensor.local.detach()
            if local.is_contiguous() and (steady is None or local.untyped_storage().data_ptr() in steady):
                self._steady[tensor.spec.name] = self._memory(local, is_private=False)
            else:
                self._copied.append(tensor)

    @property
    def can_pin(self) -> bool:
        """Return whether copies go to the host from a device whose runtime pins memory: CUDA's, and ROCm's."""
        return self._device is not None and self._device.type == "cuda"

    def begin(self) -> dict[str, Memory]:
        """Return the memory of every tensor by name, as it is now. Main thread, at the start of a save."""
        copies: dict[str, Memory] = {}
        for tensor in self._copied:
            packed = tensor.local.detach().clone(memory_format=torch.contiguous_format)
            copies[tensor.spec.name] = self._memory(packed, is_private=True)
        if self._stream is not None:
            assert self._device is not None
            self._stream.wait_stream(torch.get_device_module(self._device).current_stream(self._device))
        return {**self._steady, **copies}

    @property
    def steady(self) -> dict[str, Memory]:
        """Return the memory of the tensors with changes at known times only."""
        return self._steady

    def changing(self) -> dict[str, Memory]:
        """Return the memory of the other tensors in its current state, without a copy if contiguous."""
        return {
            tensor.spec.name: self._memory(tensor.local.detach().contiguous(), is_private=False)
            for tensor in self._copied
        }

    def _memory(self, packed: torch.Tensor, *, is_private: bool) -> Memory:
        if packed.device.type == "cpu":
            return HostMemory(packed, is_private=is_private)
        assert self._stream is not None
        return DeviceMemory(packed, self._stream)


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """Return the stream of all copies from a device: they end in order, also copies into the same memory."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream


def memory_of(local: torch.Tensor) -> memoryview:
    """Return the packed image of a tensor: its own memory if possible, otherwise a copy on the host."""
    packed = local.detach().contiguous().cpu()
    return memoryview(packed.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
