"""Snapshots of the bytes to save, valid while training continues, and the plan and memory reused between saves."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from reprise.errors import CheckpointError
from reprise.format.layout import PAGE_BYTES
from reprise.saving.cast import Cast
from reprise.saving.plan import Chunk, ChunkPart, Plan, make_plan
from reprise.saving.policy import SavePolicy
from reprise.storage.worker import Worker, run_together
from reprise.tensors.live import Contents, storages_of
from reprise.tensors.memory import Arena, Bytes, Memory

_log = logging.getLogger(__name__)


# O_DIRECT requires memory aligned to the device's logical block size, at most 512 bytes on common devices.
DIRECT_BYTES = 512


class Snapshot:
    """Supplies chunks' bytes, from live memory until `release` and from copies after it.

    Parameters and optimizer state change only inside `optimizer.step()`, so chunks written earlier need no copy.
    `release` copies the others. Tensors free to change earlier have private memory, copied when the snapshot is
    created. The main thread creates and releases the snapshot. Writer threads read each chunk once.

    If a program may change any tensor at any time, `release` is called as soon as the writers start, and does not wait
    for a write: the writers work on copies (`reads_in_place` is False). An arena with its pages faulted in takes all
    chunks before the writers start (`copies_first`). Into a new arena the main thread copies while the writers run: a
    page fault can take longer than writing the page to disk.

    Args:
        memory: Each tensor's memory. Only private memory may change before `release`.
        chunks: The chunks to write, in approximate write order.
        arena: Memory for the copies. Cleared here, so no other snapshot may be using it.
        stall_timeout_s: Seconds `release` waits for the next chunk to be written.
        copies_first: Whether to copy as much as fits into the arena before any chunk is written.
        reads_in_place: Whether writers use live memory directly where alignment allows.

    Attributes:
        is_aborted: Whether live memory may change although the save still reads it.
    """

    def __init__(
        self,
        memory: Mapping[str, Memory],
        chunks: Sequence[Chunk],
        *,
        arena: Arena,
        stall_timeout_s: float,
        copies_first: bool = False,
        reads_in_place: bool = True,
    ) -> None:
        arena.clear()
        self._arena, self._stall_timeout_s = arena, stall_timeout_s
        self._memory, self._chunks, self._reads_in_place = memory, chunks, reads_in_place
        self.copied_bytes = sum(source.total_bytes for source in memory.values() if source.is_private)
        self._changed = threading.Condition()
        self._taken = set[int]()  # chunks that a writer, or a copy to the arena, was first to take
        self._staged: dict[int, tuple[Bytes, torch.Event | None]] = {}
        self._live = {id(chunk) for chunk in chunks if not self._is_private(chunk)}  # chunks that need live memory
        self._read_count = 0
        self._is_released = self._is_closed = self.is_aborted = False
        self._stage_ahead(copies_first=copies_first)

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

    def check(self) -> None:
        """Fail if live memory may have changed while it was read.

        Raises:
            CheckpointError: The snapshot was aborted.
        """
        if self.is_aborted:
            raise stalled_error()

    def _stage_ahead(self, *, copies_first: bool) -> None:
        """Copy what fits in the arena: device memory asynchronously, and host memory if `copies_first`."""
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
                if not self._changed.wait(self._stall_timeout_s) and count == self._read_count:
                    self.is_aborted = True

    def _is_private(self, chunk: Chunk) -> bool:
        return all(self._memory[part.piece.name].is_private for part in chunk.parts)

    def _is_on_device(self, chunk: Chunk) -> bool:
        return any(self._memory[part.piece.name].is_on_device for part in chunk.parts)

    def _in_place(self, chunk: Chunk) -> memoryview | None:
        """Return the chunk's live memory if it is contiguous and aligned for O_DIRECT, else None."""
        if self._is_on_device(chunk) or not (self._reads_in_place or self._is_private(chunk)):
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


class Staging:
    """The plan and the arena, reused between a rank's saves. Main thread.

    Args:
        worker: Faults in a new arena's pages.
    """

    def __init__(self, policy: SavePolicy, rank: int, worker: Worker) -> None:
        self._policy, self._rank, self._worker = policy, rank, worker
        self._plan: Plan | None = None
        self._cast: Cast | None = None
        self.arena = Arena(0, is_pinned=False)
        self._is_touched = True

    def cast(self, contents: Contents) -> Contents:
        """Return the contents with the tensors' current values in the policy's dtype. No save may be under way."""
        dtype = self._policy.dtype
        if dtype is None:
            return contents
        if self._cast is None or self._cast.source is not contents.live:
            self._cast = Cast(contents, dtype, file_bytes=self._policy.file_bytes)
        return self._cast.filled(contents)

    def plan(self, contents: Contents) -> Plan:
        """Return the plan for saving `contents`: the previous plan if the tensors are the very same.

        A new plan may replace the arena by a larger arena, so no save may be under way. Without memory for it, steps
        wait for the disk. A save not overtaken by training needs no arena.
        """
        if self._plan is None or not self._plan.suits(contents):
            policy = self._policy
            is_overtaken = policy.async_save and not contents.is_own
            is_steady = policy.copies_at_call or not is_overtaken
            steady = None if is_steady else storages_of(contents.optimizers, contents.constant)
            plan = make_plan(contents, rank=self._rank, file_bytes=policy.file_bytes, steady=steady)
            self._plan, limit = plan, policy.staging_bytes
            total_bytes = sum(chunk.size + PAGE_BYTES for chunk in plan.order)  # a copy of every chunk
            total_bytes = total_bytes if limit is None else min(limit, total_bytes)
            if is_overtaken and total_bytes > self.arena.total_bytes:
                try:
                    larger = Arena(total_bytes, is_pinned=plan.sources.can_pin)
                except (CheckpointError, OSError) as error:
                    _log.error(
                        "cannot allocate %d B of staging memory, so steps will wait for the disk: %s",
                        total_bytes,
                        error,
                    )
                else:
                    self.arena.close()
                    self.arena, self._is_touched = larger, False
        return self._plan

    def begin(self, plan: Plan) -> Snapshot:
        """Take a snapshot of the current state. No other save may be using the arena."""
        return Snapshot(
            plan.sources.begin(),
            plan.order,
            arena=self.arena,
            stall_timeout_s=self._policy.stall_timeout_s,
            copies_first=self._policy.copies_at_call and self._is_touched,
            reads_in_place=not self._policy.copies_at_call,
        )

    def populate(self) -> None:
        """Fault in a new arena's pages on the worker, after jobs submitted earlier.

        Most chunks are on disk by the time a step needs copies. In the other order, the first save with 124M parameters
        started after the page faults, and was durable after 4.2 to 5.5 s instead of 1.2 s.
        """
        if not self._is_touched:
            self._is_touched = True
            self._worker.submit(self.arena.touch)

    def close(self) -> None:
        """Free the arena and the plan. No thread may be using them."""
        self.arena.close()
        self._plan = None
