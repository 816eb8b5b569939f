"""Digests of replicated bytes, taken at the start of a save, by which the ranks compare their replicas."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from reprise.commit.inventory import SharedDigests
from reprise.format.manifest import DIGEST_BYTES, Written, block_ranges
from reprise.saving.plan import Piece, SharedPieces
from reprise.tensors.memory import DeviceMemory, HostMemory, Memory


@dataclass(frozen=True, slots=True)
class DigestBlock:
    """One digest block of a piece of any rank: bytes `[lo, hi)` of the packed image of this rank's box of a tensor."""

    name: str
    lo: int
    hi: int


def blocks_of(piece: Piece) -> list[DigestBlock]:
    """Return the digest blocks of a piece in order."""
    return [DigestBlock(piece.name, lo, hi) for lo, hi in block_ranges(piece.lo, piece.hi)]


class ReplicaDigests:
    """Digests this rank's replicas of pieces that other ranks write; the writer digests the pieces of this rank.

    Parameters and optimizer state change only inside `optimizer.step()`, so a background thread digests them until
    `release`, which digests the rest. Tensors that may change earlier are digested at construction. For tensors on a
    device, the device computes a checksum at construction, in stream order.

    Args:
        shared: the pieces of every box that other ranks hold too.
        pieces_of_rank: the pieces this rank writes.
        memory: the memory of each tensor; host memory does not change until `release`.
        changing: the memory of tensors that may change at any time.
    """

    def __init__(
        self,
        shared: SharedPieces,
        pieces_of_rank: Sequence[Piece],
        memory: Mapping[str, Memory],
        changing: Mapping[str, Memory],
    ) -> None:
        self._shared = shared
        self._memory = {**memory, **changing}
        self._digests: dict[DigestBlock, bytes] = {}
        sums: dict[DigestBlock, torch.Tensor] = {}
        self._left: deque[DigestBlock] = deque()
        self._changed = threading.Condition()
        self._is_released = False
        self.blocked_s = 0.0
        starts = {(piece.name, piece.lo) for piece in pieces_of_rank}
        for piece in (piece for tensors in shared.values() for pieces in tensors.values() for piece in pieces):
            source = self._memory[piece.name]
            for block in blocks_of(piece):
                if isinstance(source, DeviceMemory):
                    sums[block] = checksum(source.bytes[block.lo : block.hi])
                elif piece.name in changing:
                    self._digests[block] = _digest(source, block)
                elif (piece.name, piece.lo) not in starts:
                    self._left.append(block)
        self._sums = _Sums(sums)
        self._open = len(self._left)

    @property
    def calls(self) -> tuple[Callable[[], None], ...]:
        """Return the call to make beside the writes, if there is anything to digest."""
        return (self.run,) if self._left else ()

    def run(self) -> None:
        """Digest the remaining blocks from the first one on. Any thread."""
        while self._take(self._left.popleft):
            pass

    def release(self) -> None:
        """Digest the remaining blocks from the last one backwards, so that live memory may change. Main thread."""
        if self._is_released:
            return
        self._is_released = True
        start = time.perf_counter()
        while self._take(self._left.pop):
            pass
        self._await_all()
        self.blocked_s += time.perf_counter() - start

    def all(self, result: Written) -> SharedDigests:
        """Wait for the digests of all shared boxes and return them.

        Args:
            result: the pieces written by this rank, with their digests.
        """
        self._await_all()
        digests = self._sums.all() | self._digests
        for piece in result.pieces:
            for at, block in enumerate(blocks_of(Piece(piece.name, piece.box, piece.lo, piece.hi))):
                digests.setdefault(block, piece.digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES])
        return {
            ranks: {
                name: b"".join(digests[block] for piece in pieces for block in blocks_of(piece))
                for name, pieces in tensors.items()
            }
            for ranks, tensors in self._shared.items()
        }

    def _take(self, pop: Callable[[], DigestBlock]) -> bool:
        """Digest one block; return False if none is left."""
        try:
            block = pop()
        except IndexError:
            return False
        source = self._memory[block.name]
        assert isinstance(source, HostMemory)
        try:
            self._digests[block] = _digest(source, block)
        finally:  # also on failure: another thread may wait for this block
            with self._changed:
                self._open -= 1
                self._changed.notify_all()
        return True

    def _await_all(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0)


class _Sums:
    """Checksums by block, copied from a device to the host without waiting for its stream."""

    def __init__(self, sums: Mapping[DigestBlock, torch.Tensor]) -> None:
        self._blocks = list(sums)
        if not sums:
            return
        totals = torch.stack(list(sums.values()))
        is_on_device = totals.device.type != "cpu"
        self._totals = torch.empty(totals.shape, dtype=totals.dtype, device="cpu", pin_memory=is_on_device)
        self._totals.copy_(totals, non_blocking=True)
        self._event: torch.Event | None = None
        if is_on_device:
            self._event = torch.get_device_module(totals.device).current_stream(totals.device).record_event()

    def all(self) -> dict[DigestBlock, bytes]:
        """Wait for the copy and return the checksums. Any thread."""
        if not self._blocks:
            return {}
        if self._event is not None:
            self._event.synchronize()
        return {
            block: struct.pack(">q", total) for block, total in zip(self._blocks, self._totals.tolist(), strict=True)
        }


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Return the sum over i of (2 i + 1) * word i, modulo 2^64, as a 0-d int64 tensor on the device of the data.

    Words are 4 bytes, or 1 byte where size or address is not a multiple of 4. A change of a single word always changes
    the sum, since an odd number has an inverse modulo 2^64. The sum does not depend on the order of addition.

    Args:
        data: bytes, of shape `[n]`.
    """
    is_aligned = data.numel() % 4 == 0 and data.data_ptr() % 4 == 0
    words = (data.view(torch.int32) if is_aligned else data).to(torch.int64)
    return (words * torch.arange(1, 2 * words.numel(), 2, device=data.device)).sum()


def _digest(source: HostMemory, block: DigestBlock) -> bytes:
    data = (ctypes.c_ubyte * (block.hi - block.lo)).from_address(source.address + block.lo)
    return xxhash.xxh3_64_intdigest(data).to_bytes(DIGEST_BYTES, "big")
