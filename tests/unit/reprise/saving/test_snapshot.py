"""Snapshots of device memory, on a device that is made up: its copies run only when something waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reprise.format.box import Box
from reprise.format.manifest import Piece
from reprise.saving.plan import Chunk, ChunkPart
from reprise.saving.policy import SavePolicy
from reprise.saving.snapshot import Snapshot
from reprise.tensors.memory import Arena, Bytes, map_memory
from tests.fakes import JOIN_S

SIZE, COUNT = 8192, 5


class Stream:
    """A stream of copies in order, none of which runs before it has to."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def add(self, work: Callable[[], None]) -> Event:
        with self._lock:
            self._work.append(work)
            return Event(self, len(self._work))

    def run(self, count: int) -> None:
        """Run the first `count` of all works, unless they have run."""
        with self._lock:
            for number in range(count):
                self._work[number]()
                self._work[number] = lambda: None


class Event:
    """The end of the first works of a stream; training that comes after `wait` sees them done."""

    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def wait(self) -> None:
        self._stream.run(self._count)

    synchronize = wait


class Memory:
    """Memory of the made-up device."""

    is_on_device, is_private, address = True, False, 0

    def __init__(self, stream: Stream, value: int) -> None:
        self.bytes = np.full(SIZE, value, dtype=np.uint8)
        self.total_bytes = SIZE
        self._stream = stream

    def copy_to(self, target: Bytes, lo: int) -> Event:
        def copy() -> None:
            target[:] = self.bytes[lo : lo + target.nbytes]

        return self._stream.add(copy)


def chunks_of(names: list[str]) -> list[Chunk]:
    return [
        Chunk(number * SIZE, SIZE, [ChunkPart(Piece(name, Box((0,), (SIZE,)), 0, SIZE), 0, SIZE)])
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize("staged", [COUNT, 2, 0])
def test_a_step_comes_after_the_copies_from_the_device(staged: int) -> None:
    """With room for fewer chunks the step waits until the writer, here a thread, has the others."""
    stream = Stream()
    memory = {name: Memory(stream, number + 1) for number, name in enumerate("abcde")}
    chunks = chunks_of(list(memory))
    policy = SavePolicy(Path(), stall_timeout_s=JOIN_S)
    snapshot = Snapshot(memory, chunks, arena=Arena(staged * SIZE, is_pinned=False), policy=policy)
    assert snapshot.copied_bytes == staged * SIZE  # all that fits is on its way before anything waits
    values: dict[str, set[int]] = {}

    def write() -> None:
        bounce = map_memory(2 * SIZE)
        for chunk in chunks:
            values[chunk.parts[0].piece.name] = set(snapshot.take(chunk, bounce))
            snapshot.done(chunk)

    writer = threading.Thread(target=write)
    if staged < COUNT:
        writer.start()
    snapshot.release()
    for tensor in memory.values():
        tensor.bytes[:] = 100  # the step
    if staged == COUNT:
        writer.start()
    writer.join(JOIN_S)
    snapshot.close()
    assert not writer.is_alive()
    assert values == {name: {number + 1} for number, name in enumerate(memory)}
