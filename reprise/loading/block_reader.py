"""Reads and verifies a checkpoint's blocks on several threads, without torch."""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.blocks import PieceBlock
from reprise.loading.reader import Bytes, Checkpoint, open_tensor_file, require_held
from reprise.storage.worker import Worker

MOST_THREADS = 4  # two threads on two cores read at memory copy speed; more were slower on a cold disk
PROGRESS_S = 1.0
Progress = Callable[[int], object]
# Seconds that an aborted load waits for threads stuck in a read.
_LEAVE_S = 5.0


def host_memory() -> Bytes:
    """Return host memory for a block."""
    return np.empty(BLOCK_BYTES, np.uint8)


class BlockReader:
    """Reads and verifies blocks on several threads, which take them in file order.

    Args:
        memory: Allocates a thread's memory for a block.

    Attributes:
        done_bytes: Bytes copied to live memory, or verified.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        blocks: Iterable[PieceBlock],
        *,
        memory: Callable[[], Bytes] = host_memory,
    ) -> None:
        self._checkpoint, self._blocks, self._memory = checkpoint, enumerate(blocks), memory
        self._lock = threading.Lock()
        self.done_bytes = 0

    def run(self, progress: Progress = lambda _: None) -> None:
        """Read until all blocks are done, or a thread fails, which stops the others at their next block.

        Threads take blocks in order and finish them, so the failure with the lowest number is the first in the files,
        regardless of thread timing.

        Args:
            progress: Called with the bytes done so far, about once a second and at the end, on the calling thread.
        """
        count = self._checkpoint.files.reading_threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        numbers = [0] * count  # each thread's last block
        workers = [Worker("checkpoint-reader") for _ in numbers]
        jobs = [worker.submit(partial(self._work, numbers, thread)) for thread, worker in enumerate(workers)]
        try:
            for job in jobs:
                while not job.ends(PROGRESS_S):
                    progress(self.done_bytes)
        finally:
            self.close()
            for worker in workers:
                worker.close(_LEAVE_S)
        for _, job in sorted(zip(numbers, jobs, strict=True), key=operator.itemgetter(0)):
            job.wait()
        progress(self.done_bytes)

    def close(self) -> None:
        """Stop threads from taking another block."""
        self._blocks = enumerate(())

    def _work(self, numbers: list[int], thread: int) -> None:
        """Read blocks until none is left."""
        try:
            buffer = self._memory()
            for name, blocks in itertools.groupby(self._take(numbers, thread), key=lambda block: block.place.file):
                with open_tensor_file(self._checkpoint.files, self._checkpoint.path / name) as file:
                    for block in blocks:
                        require_held(self._checkpoint, block.place, block.number)
                        data = buffer[: block.hi - block.lo] if block.into is None else block.into
                        block.read(file, data)
                        size = data.size if block.into is not None or block.move is None else block.move(data)
                        with self._lock:
                            self.done_bytes += size
        finally:
            self.close()

    def _take(self, numbers: list[int], thread: int) -> Iterator[PieceBlock]:
        while True:
            with self._lock:
                numbers[thread], block = next(self._blocks, (numbers[thread], None))
            if block is None:
                return
            yield block
