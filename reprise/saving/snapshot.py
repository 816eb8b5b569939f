"""Snapshots of the bytes to save, valid while training continues."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from reprise.errors import CheckpointError
from reprise.format.layout import PAGE_BYTES
from reprise.saving.plan import Chunk, ChunkPart
from reprise.saving.policy import SavePolicy
from reprise.storage.worker import run_together
from reprise.tensors.memory import Arena, Bytes, Memory

# O_DIRECT requires memory aligned to the device's logical block size, at most 512 bytes on common devices.
DIRECT_BYTES = 512


class Snapshot:
    """Supplies chunks' bytes, from live memory until `release` and from copies after it.

    Parameters and optimizer state change only inside `optimizer.step()`, so chunks written earlier need no copy.
    `release` copies the others. Tensors free to change earlier have private memory, copied when the snapshot is
    created. The main thread creates and releases the snapshot. Writer threads read each chunk once.

    If a program may change any tensor at any time, `release` is called as soon as the writers start, and does not wait
    for a write: the writers work on copies, never on live memory. An arena with its pages faulted in takes all chunks
    before the writers start. Into a new arena the main thread copies while the writers run: a page fault can take
    longer than writing the page to disk.

    Args:
        memory: Each tensor's memory. Only private memory may change before `release`.
        chunks: The chunks to write, in approximate write order.
        arena: Memory for the copies. Cleared here, so no other snapshot may be using it.
        policy: If it `copies_at_call`, a program may change any tensor at any time.

    Attributes:
        is_aborted: Whether live memory may change although the save still reads it.
    """

    def __init__(
        self,
        memory: Mapping[str, Memory],
        chunks: Sequence[Chunk],
        *,
        arena: Arena,
        policy: SavePolicy,
    ) -> None:
        arena.clear()
        self._memory, self._chunks, self._arena, self._policy = memory, chunks, arena, policy
        self.copied_bytes = sum(source.total_bytes for source in memory.values() if source.is_private)
        self._changed = threading.Condition()
        self._taken = set[int]()  # chunks that a writer, or a copy to the arena, was first to take
        self._staged: dict[int, tuple[Bytes, torch.Event | None]] = {}
        self._live = {id(chunk) for chunk in chunks if not self._is_private(chunk)}  # chunks that need live memory
        self._read_count = 0
        self._is_released = self._is_closed = self.is_aborted = False
        self._stage_ahead()

    def take(self, chunk: Chunk, bounce: Bytes) -> memoryview:
        """Return a chunk's bytes, valid until `done`. Any writer thread may call it, once per chunk.

        Args:
            bounce: A page-aligned buffer, a page larger than the chunk, for bytes not writable in place.

        Raises:
            CheckpointError: The snapshot was aborted.
        """
        with self._changed:
            is_copied = id(chunk) in self._taken
            self._taken.add(id(chunk))
            self._changed.wait_for(lambda: not is_copied or self.is_aborted or id(chunk) in self._staged)
            self.check()
        if is_copied:
            memory, event = self._staged[id(chunk)]
        elif (in_place := self._in_place(chunk)) is not None:
            return in_place
        else:
            start = chunk.offset % PAGE_BYTES
            memory = bounce[start : start + chunk.size]
            event = self._gather(chunk, memory)
        if event is not None:
            event.synchronize()
        if not is_copied:
            self.done(chunk)
        return memoryview(memory)  # type: ignore[arg-type]

    def done(self, chunk: Chunk) -> None:
        """Mark a chunk as written, or as given up after an error. Its live memory may change."""
        with self._changed:
            self._live.discard(id(chunk))
            self._read_count += 1
            self._changed.notify_all()

    def release(self) -> None:
        """Copy all chunks not yet written, after which live memory may change. Main thread.

        Copies from the last chunk backwards while the writers proceed from the first. When the arena is full, waits
        until the remaining chunks are written. If no chunk is written for `stall_timeout_s`, aborts the snapshot.
        A second call returns at once.
        """
        if self._is_released:
            return
        self._is_released = True
        for chunk in reversed(self._chunks):
            if not self._is_private(chunk) and not self._stage(chunk):
                break
        self._await_written()
        events = [event for _, event in self._staged.values() if event is not None]
        for event in events[-1:]:  # the current stream waits for the copies; the host does not
            event.wait()

    def close(self) -> None:
        """End the snapshot: optimizer steps no longer wait for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Stop protecting live memory. A save still reading it must not be committed."""
        self.is_aborted = True
        with contextlib.suppress(RuntimeError):  # raised once not held; an interrupt may have left it locked
            while True:
                self._changed.release()
        with self._changed:
            self._changed.notify_all()

    def has_room(self, total_bytes: int) -> bool:
        """Return whether the policy allows more memory besides the arena, for a save that was not aborted."""
        limit = self._policy.staging_bytes
        return not self.is_aborted and (limit is None or total_bytes + self._arena.total_bytes <= limit)

    def check(self) -> None:
        """Fail if live memory may have changed while it was read.

        Raises:
            CheckpointError: The snapshot was aborted.
        """
        if self.is_aborted:
            raise stalled_error()

    def _stage_ahead(self) -> None:
        """Copy what fits in the arena: device memory asynchronously, and host memory if it may change at any time."""
        copies_first = self._policy.copies_at_call and self._arena.is_touched
        early = [c for c in self._chunks if self._is_on_device(c) or (copies_first and not self._is_private(c))]
        threads = torch.get_num_threads() if copies_first else 1  # torch's threads are free while the caller waits
        run_together([partial(self._stage, chunk) for chunk in early], name="checkpoint-copies", threads=threads)

    def _stage(self, chunk: Chunk) -> bool:
        """Copy a chunk to the arena, unless a writer already has it. Return False if the arena is full.

        After an error the snapshot must be aborted.
        """
        with self._changed:
            if self._is_closed or id(chunk) in self._taken:
                return True
            room = self._arena.take(chunk.size, offset=chunk.offset)
            if room is None:
                return False
            self._taken.add(id(chunk))
        event = self._gather(chunk, room)
        with self._changed:
            self.copied_bytes += chunk.size
            self._staged[id(chunk)] = room, event
            self._live.discard(id(chunk))
            self._changed.notify_all()
        return True

    def _await_written(self) -> None:
        with self._changed:
            while self._live and not (self._is_closed or self.is_aborted):
                count = self._read_count
                if not self._changed.wait(self._policy.stall_timeout_s) and count == self._read_count:
                    self.is_aborted = True

    def _is_private(self, chunk: Chunk) -> bool:
        return all(self._memory[part.piece.name].is_private for part in chunk.parts)

    def _is_on_device(self, chunk: Chunk) -> bool:
        return any(self._memory[part.piece.name].is_on_device for part in chunk.parts)

    def _in_place(self, chunk: Chunk) -> memoryview | None:
        """Return the chunk's live memory if it is contiguous and aligned for O_DIRECT, else None."""
        if self._is_on_device(chunk) or (self._policy.copies_at_call and not self._is_private(chunk)):
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

    def _gather(self, chunk: Chunk, target: Bytes) -> torch.Event | None:
        """Copy a chunk's bytes to `target`. Return the event after the last device copy, if any."""
        at = 0
        event = None
        for part in chunk.parts:
            size = part.hi - part.lo
            event = self._memory[part.piece.name].copy_to(target[at : at + size], part.lo) or event
            at += size
        return event


def stalled_error(where: object = None) -> CheckpointError:
    """Return the error for a save aborted while live memory had to stay unchanged."""
    return CheckpointError(
        "A save was aborted: the disk stalled, or an exception interrupted the copying",
        where=where,
        expected="a chunk written at least every stall_timeout_s",
        fix="Training continues and committed checkpoints are untouched. Check the file system.",
    )
