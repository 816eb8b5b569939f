"""Keeps the bytes of a save as they were when it began, while training goes on. `writer.py` writes them."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto

import torch

from trainer.checkpoint.format.layout import PAGE_BYTES
from trainer.checkpoint.saving.chunks import Chunk, ChunkPart
from trainer.checkpoint.tensors.arena import Arena, Bytes
from trainer.checkpoint.tensors.memory import Memory
from trainer.errors import CheckpointError

# O_DIRECT wants memory on the block size of the device, 512 bytes or less where it is not said otherwise.
DIRECT_BYTES = 512


class _State(Enum):
    """Where the bytes of a chunk are."""

    LIVE = auto()  # in live memory only
    READ_IN_PLACE = auto()  # in live memory, from which they are just being written
    STAGING = auto()  # being copied
    STAGED = auto()  # in the arena
    READ = auto()  # wherever the writer has them: live memory may change


_NEEDS_LIVE = (_State.LIVE, _State.READ_IN_PLACE, _State.STAGING)


class Snapshot:
    """Gives the bytes of chunks: from live memory until `release`, which copies what is not written yet.

    Parameters and optimizer state change inside `optimizer.step()` only, so a save needs no copy of what is written by
    then. What may change earlier is copied when the snapshot is made. The main thread makes and releases it, writing
    threads read it, each chunk once.

    Args:
        memory: where the bytes of each tensor are; what is not private stays as it is until `release`.
        chunks: what will be written, in about that order.
        arena: where copies go; cleared here, so no other snapshot may use it.
        stall_timeout_s: how long `release` may wait without seeing a chunk written.
    """

    def __init__(
        self,
        memory: Mapping[str, Memory],
        chunks: Sequence[Chunk],
        *,
        arena: Arena,
        stall_timeout_s: float,
    ) -> None:
        arena.clear()
        self._arena, self._stall_timeout_s = arena, stall_timeout_s
        self._chunks = list(chunks)
        self._memory = memory
        self.copied_bytes = sum(found.total_bytes for found in memory.values() if found.is_private)
        self.blocked_s = 0.0
        self._changed = threading.Condition()
        self._states = {id(chunk): _State.LIVE for chunk in chunks}
        self._staged: dict[int, tuple[Bytes, torch.cuda.Event | None]] = {}
        self._is_released = self._is_closed = self._is_aborted = False
        self._left = sum(not self._is_private(chunk) for chunk in chunks)  # how many of them need live memory
        self._read_count = 0
        self._stage_ahead()

    def take(self, chunk: Chunk, bounce: Bytes) -> memoryview:
        """Return the bytes of a chunk, valid until `done`; any writing thread may ask, once for each chunk.

        Args:
            bounce: room for a chunk and a page, on page-aligned ground, for bytes that do not lie as the file does.

        Raises:
            CheckpointError: if the snapshot was aborted before.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._states[id(chunk)] is not _State.STAGING)
            self._require()
            is_staged = self._states[id(chunk)] is _State.STAGED
            if not is_staged:
                self._states[id(chunk)] = _State.READ_IN_PLACE
        if is_staged:
            memory, event = self._staged[id(chunk)]
            if event is not None:
                event.synchronize()
            return memoryview(memory)  # type: ignore[arg-type]
        in_place = self._in_place(chunk)
        if in_place is not None:
            return in_place
        start = chunk.offset % PAGE_BYTES
        copy = bounce[start : start + chunk.size]
        event = self._gather(chunk, copy)
        if event is not None:
            event.synchronize()
        self._set(chunk, _State.READ)
        return memoryview(copy)  # type: ignore[arg-type]

    def done(self, chunk: Chunk) -> None:
        """Mark a chunk as written, or as never to be: `take` may have returned live memory."""
        self._set(chunk, _State.READ)

    def release(self) -> None:
        """Copy what is not written yet, so that live memory may change. Main thread; a second call costs nothing.

        It copies from the end while the writers go on from the start. Where the arena is full, it waits until the rest
        is written; if no chunk is written for `stall_timeout_s`, the snapshot is aborted.
        """
        if self._is_released:
            return
        start = time.perf_counter()
        self._is_released = True
        for chunk in reversed(self._chunks):
            if not self._is_private(chunk) and not self._stage(chunk):
                break
        self._await_written()
        self._order_device()
        self.blocked_s += time.perf_counter() - start

    def close(self) -> None:
        """End the snapshot: nothing more will be read, so no step waits for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Let live memory change from now on; bytes that are still being written from it must not be committed."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    @property
    def is_aborted(self) -> bool:
        return self._is_aborted

    def check(self) -> None:
        """Refuse to go on if live memory may have changed while it was read.

        Raises:
            CheckpointError: after `abort`.
        """
        with self._changed:
            self._require()

    def _require(self) -> None:
        if self._is_aborted:
            raise CheckpointError(
                "A save was aborted while it was being written: the disk hangs", fix="Training goes on."
            )

    def _stage_ahead(self) -> None:
        """Start copying what lies on a device, as much as the arena holds; the host does not wait."""
        if not any(memory.is_on_device for memory in self._memory.values()):
            return
        for chunk in self._chunks:
            if self._is_on_device(chunk) and not self._stage(chunk):
                break

    def _stage(self, chunk: Chunk) -> bool:
        """Copy a chunk to the arena if nobody reads it yet; return False if the arena is full."""
        with self._changed:
            if self._is_closed or self._states[id(chunk)] is not _State.LIVE:
                return True
            room = self._arena.take(chunk.size, offset=chunk.offset)
            if room is None:
                return False
            self._states[id(chunk)] = _State.STAGING
        try:
            event = self._gather(chunk, room)
        except BaseException:
            self._set(chunk, _State.LIVE)
            raise
        self.copied_bytes += chunk.size
        with self._changed:
            self._staged[id(chunk)] = room, event
        self._set(chunk, _State.STAGED)
        return True

    def _await_written(self) -> None:
        with self._changed:
            while self._left and not (self._is_closed or self._is_aborted):
                count = self._read_count
                if not self._changed.wait(self._stall_timeout_s) and count == self._read_count:
                    self._is_aborted = True

    def _order_device(self) -> None:
        """Let the device's next work wait for the copies, so that the host need not."""
        events = [event for _, event in self._staged.values() if event is not None]
        for event in events[-1:]:
            torch.cuda.current_stream().wait_event(event)

    def _set(self, chunk: Chunk, state: _State) -> None:
        with self._changed:
            needed, self._states[id(chunk)] = self._states[id(chunk)] in _NEEDS_LIVE, state
            if not self._is_private(chunk):
                self._left += (state in _NEEDS_LIVE) - needed
            self._read_count += state is _State.READ
            self._changed.notify_all()

    def _is_private(self, chunk: Chunk) -> bool:
        return all(self._memory[part.piece.name].is_private for part in chunk.parts)

    def _is_on_device(self, chunk: Chunk) -> bool:
        return any(self._memory[part.piece.name].is_on_device for part in chunk.parts)

    def _in_place(self, chunk: Chunk) -> memoryview | None:
        """Return live memory that lies as the file does: in one extent, and where O_DIRECT wants it."""
        if self._is_on_device(chunk):
            return None
        first = self._address(chunk.parts[0])
        address = first
        for part in chunk.parts:
            if self._address(part) != address:
                return None
            address += part.hi - part.lo
        if chunk.strided is None and (first - chunk.offset) % DIRECT_BYTES:
            return None
        return memoryview((ctypes.c_ubyte * chunk.size).from_address(first)).cast("B")

    def _address(self, part: ChunkPart) -> int:
        return self._memory[part.piece.name].address + part.lo

    def _gather(self, chunk: Chunk, target: Bytes) -> torch.cuda.Event | None:
        """Copy the bytes of a chunk to `target`; return the event after which copies from a device are there."""
        at = 0
        event = None
        for part in chunk.parts:
            size = part.hi - part.lo
            event = self._memory[part.piece.name].copy_to(target[at : at + size], part.lo) or event
            at += size
        return event
