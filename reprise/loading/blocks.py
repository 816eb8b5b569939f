"""A checkpoint's blocks, each with its own digest: lists them, and reads and verifies them. Without torch."""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from reprise.errors import CheckpointError
from reprise.format.box import Image, whole
from reprise.format.host_file import PieceNumbers
from reprise.format.layout import MOST_ELEMENTS, Place
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES, WrittenPiece
from reprise.loading.reader import Bytes, Checkpoint, OpenFile, open_tensor_file, read_places, require_held
from reprise.storage.worker import Worker

MOST_THREADS = 4  # two threads on two cores read at memory copy speed; more were slower on a cold disk
_THREAD_BYTES = 4 << 20  # justify starting another thread
PROGRESS_S = 1.0
Progress = Callable[[int], object]
# Seconds that an aborted load waits for threads stuck in a read.
_LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class PieceBlock:
    """Bytes `[lo, hi)` in a piece's packed image, with their hexadecimal digest.

    Args:
        number: The piece's number in its tensor.
        into: The memory to read it into directly. None for a buffer.
        move: Copies the bytes that are needed from the buffer, and returns their count. None only verifies the block.
    """

    place: Place
    number: int
    packed: Image
    lo: int
    hi: int
    digest: str
    into: Bytes | None = None
    move: Callable[[Bytes], int] | None = None

    def __str__(self) -> str:
        return f"{self.place.file}, {self._in_file}"

    @property
    def _in_file(self) -> str:
        ranges = ", ".join(f"{part.start}:{part.stop}" for part in self.packed.box.slices)
        part = f" of elements [{ranges}]" if self.packed.total_bytes < self.place.spec.total_bytes else ""
        return f"tensor {self.place.spec.name}, bytes [{self.lo}, {self.hi}){part}"

    def read(self, file: OpenFile, into: Bytes) -> None:
        """Fill an array with the bytes, and compare them with their digest.

        Raises:
            CheckpointError: The digest differs. Names the file, tensor and byte range.
        """
        digest, step = xxhash.xxh3_64(), file.files.step_bytes if self.packed.is_contiguous else into.size
        for at in range(0, into.size, step):
            part = into[at : at + step]
            file.gather(self.packed, self.lo + at, part, offset=self.place.offset)
            digest.update(part.data)
        if (actual := digest.hexdigest()) != self.digest:
            raise CheckpointError(
                "A tensor is damaged",
                where=f"{file.path}, {self._in_file}",
                expected=f"digest {self.digest}",
                found=actual,
                fix="Load another iteration; this one cannot be trusted.",
            )


def blocks_of(checkpoint: Checkpoint, pieces: Mapping[str, Collection[int]]) -> Iterator[PieceBlock]:
    """Yield these pieces' blocks in file order, which is the same on every host.

    Args:
        pieces: By tensor, its piece numbers. A range is not expanded, since a range for all pieces is huge.

    Raises:
        CheckpointError: See `read_places`.
    """
    places = read_places(checkpoint)
    for place in sorted((places[name] for name in pieces), key=lambda place: (place.file, place.offset)):
        spec, numbers = place.spec, pieces[place.spec.name]
        selected = numbers if isinstance(numbers, range) else frozenset(numbers)
        for number, piece in checkpoint.manifest.tensors[spec.name].pieces_in(whole(spec.view), spec.dtype.itemsize):
            if number not in selected:
                continue
            yield from blocks_in(place, number, piece)


def blocks_in(
    place: Place, number: int, piece: WrittenPiece, *, begin: int = 0, end: int = MOST_ELEMENTS
) -> Iterator[PieceBlock]:
    """Yield a piece's blocks with a byte in `[begin, end)`, in order. By default yield all blocks."""
    packed, skipped = place.spec.image(piece.box), max(0, begin - piece.lo) // BLOCK_BYTES
    for lo in range(piece.lo + skipped * BLOCK_BYTES, min(piece.hi, end), BLOCK_BYTES):
        at = (lo - piece.lo) // BLOCK_BYTES * DIGEST_BYTES
        hi, digest = min(lo + BLOCK_BYTES, piece.hi), piece.digests[at : at + DIGEST_BYTES].hex()
        yield PieceBlock(place, number, packed, lo, hi, digest)


def bytes_of(checkpoint: Checkpoint, pieces: PieceNumbers) -> int:
    """Return these pieces' size in bytes."""
    return sum(block.hi - block.lo for block in blocks_of(checkpoint, pieces))


def host_memory() -> Bytes:
    """Return host memory for a block."""
    return np.empty(BLOCK_BYTES, np.uint8)


class BlockReader:
    """Reads and verifies blocks on several threads, which take them in file order.

    Args:
        memory: Allocates a thread's memory for a block.
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
        self._done_bytes = 0

    def run(self, progress: Progress = lambda _: None) -> int:
        """Read until all blocks are done, or a thread fails, which stops the others at their next block.

        Threads take blocks in order and finish them, so the failure with the lowest number is the first in the files,
        regardless of thread timing.

        Args:
            progress: Called with the bytes done so far, about once a second and at the end, on the calling thread.

        Returns:
            The bytes copied to live memory, or verified.
        """
        total_bytes = sum(file.total_bytes for file in self._checkpoint.manifest.files.values())
        useful = min(MOST_THREADS, len(os.sched_getaffinity(0)), 1 + total_bytes // _THREAD_BYTES)
        count = self._checkpoint.files.reading_threads or useful
        numbers = [0] * count  # each thread's last block
        workers = [Worker("checkpoint-reader") for _ in numbers]
        jobs = [worker.submit(partial(self._work, numbers, thread)) for thread, worker in enumerate(workers)]
        try:
            for job in jobs:
                while not job.ends(PROGRESS_S):
                    progress(self._done_bytes)
        finally:
            self.close()
            for worker in workers:
                worker.close(_LEAVE_S)
        for _, job in sorted(zip(numbers, jobs, strict=True), key=operator.itemgetter(0)):
            job.wait()
        progress(self._done_bytes)
        return self._done_bytes

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
                            self._done_bytes += size
        finally:
            self.close()

    def _take(self, numbers: list[int], thread: int) -> Iterator[PieceBlock]:
        while True:
            with self._lock:
                numbers[thread], block = next(self._blocks, (numbers[thread], None))
            if block is None:
                return
            yield block


def verify_tensors(checkpoint: Checkpoint, *, progress: Progress = lambda _: None) -> int:
    """Check every block's digest. Return the checked byte count.

    Args:
        progress: See `BlockReader.run`.

    Raises:
        CheckpointError: A header or block is damaged. Names the file, tensor and byte range for the first.
    """
    blocks = blocks_of(checkpoint, {name: checkpoint.held(name) for name in read_places(checkpoint)})
    return BlockReader(checkpoint, blocks).run(progress)


def check_first_blocks(checkpoint: Checkpoint) -> None:
    """Check each tensor file's first block: another iteration's file has the same size and header.

    Raises:
        CheckpointError: A header or block is damaged. Names the file, tensor and byte range.
    """
    first = dict[str, str]()
    for name, place in sorted(read_places(checkpoint).items(), key=lambda item: item[1].offset, reverse=True):
        if place.spec.total_bytes and 0 in checkpoint.held(name):
            first[place.file] = name
    blocks = (next(blocks_of(checkpoint, {name: range(1)})) for name in first.values())
    BlockReader(checkpoint, blocks).run()
