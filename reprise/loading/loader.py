"""Fills live tensors from a checkpoint, box by box, verifying every block it reads."""

from __future__ import annotations

import itertools
import operator
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.format.box import Box, absolute, extent, image, in_bytes, intersect, relative, whole
from reprise.format.layout import Place, TensorSpec
from reprise.format.manifest import BLOCK_BYTES, WrittenPiece
from reprise.loading.blocks import PieceBlock, blocks_in
from reprise.loading.reader import Bytes, Checkpoint, Gatherer, OpenFile, not_held, open_tensor_file
from reprise.storage.worker import Worker
from reprise.tensors.live import LiveTensor
from reprise.tensors.modes import overwrite, own_modes

MOST_THREADS = 4  # two on two cores read as fast as memory is copied; more were slower on a cold disk
PROGRESS_S = 1.0
# Seconds that an aborted load waits for threads that hang in a read.
_LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A rank's loading statistics: `tensors` of `expected`, `filled_bytes` of memory, in `seconds`.

    Args:
        read_bytes: bytes read to fill them: blocks are read completely, and narrow gaps along with them.
    """

    tensors: int
    expected: int
    read_bytes: int
    filled_bytes: int
    seconds: float

    def __add__(self, other: LoadReport) -> LoadReport:
        """Return the statistics of two loads, one after the other."""
        return LoadReport(*map(operator.add, astuple(self), astuple(other)))


def check_tensors(
    specs: Sequence[TensorSpec],
    places: Mapping[str, Place],
    *,
    where: object,
    is_partial: bool = False,
    further: Sequence[str] = (),
) -> None:
    """Compare all expected tensors with those in the checkpoint, before anything is copied.

    Args:
        is_partial: whether the checkpoint may have others.
        further: further problems from the caller, listed after these.

    Raises:
        MismatchError: listing every missing or unexpected tensor and every difference in shape or dtype.
    """
    problems = []
    expected = {spec.name: spec for spec in specs}
    kinds = {spec.kind for spec in specs}
    for name, spec in expected.items():
        if name not in places:
            problems.append(f"{name} is missing")
            continue
        saved_spec = places[name].spec
        if saved_spec.shape != spec.shape:
            problems.append(f"{name} has shape {list(saved_spec.shape)}, the model has {list(spec.shape)}")
        if saved_spec.dtype != spec.dtype:
            problems.append(f"{name} has dtype {saved_spec.dtype}, the model has {spec.dtype}")
    if not is_partial:
        names = (name for name, place in places.items() if place.spec.kind in kinds and name not in expected)
        problems += [f"{name} is unexpected" for name in names]
    problems += further
    if problems:
        text = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise MismatchError("The checkpoint's tensors are not the model's", where=where, found=text)


@own_modes()
def fill(
    checkpoint: Checkpoint,
    places: Mapping[str, Place],
    live: Sequence[LiveTensor],
    *,
    verify: bool = True,
    is_trial: bool = False,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Read every box of `live` from the checkpoint into its live memory, verifying each block it touches.

    The tensors' version counters rise first, so that autograd refuses a graph with their old values.

    Args:
        is_trial: read and verify alone; no live memory changes.
        threads: number of reading threads; by default the available cores, at most `MOST_THREADS`.
        progress: called by the calling thread about once a second with the bytes filled so far and the total.

    Raises:
        CheckpointError: for the first damaged block in file order, naming file, tensor and bytes. Memory filled before
            stays filled.
        MismatchError: before anything is filled, for a shard of a tensor written with other dimensions.
    """
    start = time.perf_counter()
    tensors = [tensor for tensor in live if tensor.box.numel]
    tensors.sort(key=lambda tensor: (places[tensor.spec.name].file, places[tensor.spec.name].offset))
    targets = [Target(tensor, _written_box(checkpoint, places, tensor)) for tensor in tensors]
    if not is_trial:
        torch.autograd.graph.increment_version([tensor.local for tensor in tensors])
    devices = {target.tensor.local.device for target in targets} - {torch.device("cpu")}
    _synchronize(devices)
    checkpoint.files.expect(_ranges(checkpoint, _reads_of(checkpoint, places, targets)))
    queue = _Queue(_reads_of(checkpoint, places, targets))
    count = min(MOST_THREADS, len(os.sched_getaffinity(0))) if threads is None else threads
    is_pinned = bool(devices) and not is_trial
    workers = [
        _Worker(checkpoint, queue, verify=verify, is_trial=is_trial, is_pinned=is_pinned)
        for _ in range(count if targets else 0)
    ]
    _run(workers, queue, progress=progress, total_bytes=sum(target.box.numel for target in targets))
    for target in targets:
        _check_covered(checkpoint, target, sum(worker.filled[target] for worker in workers))
        if not is_trial:
            target.finish()
    _synchronize(devices)
    return LoadReport(
        tensors=len(live),
        expected=len(live),
        read_bytes=sum(worker.read_bytes for worker in workers),
        filled_bytes=sum(worker.filled_bytes for worker in workers),
        seconds=time.perf_counter() - start,
    )


def touched_pieces(
    checkpoint: Checkpoint, places: Mapping[str, Place], live: Sequence[LiveTensor]
) -> dict[str, tuple[int, ...]]:
    """Return by tensor the numbers of the pieces read by `fill` for these tensors.

    Raises:
        MismatchError: as `fill`, or for a tensor missing in the checkpoint.
    """
    check_tensors([tensor.spec for tensor in live], places, where=checkpoint.path, is_partial=True)
    numbers_by_tensor: dict[str, set[int]] = {}
    for tensor in live:
        if tensor.box.numel:
            name = tensor.spec.name
            box, size = _written_box(checkpoint, places, tensor), places[name].spec.dtype.itemsize
            pieces = checkpoint.manifest.tensors[name].pieces_in(box, size)
            numbers_by_tensor.setdefault(name, set()).update(number for number, _ in pieces)
    return {name: tuple(sorted(numbers)) for name, numbers in numbers_by_tensor.items()}


def _written_box(checkpoint: Checkpoint, places: Mapping[str, Place], tensor: LiveTensor) -> Box:
    """Return a tensor's box in the dimensions it was written in, which may differ for an unsharded tensor."""
    saved_view, lives = places[tensor.spec.name].spec.view, tensor.spec.view
    if lives == saved_view:
        return tensor.box
    if tensor.box == whole(lives):
        return whole(saved_view)
    raise MismatchError(
        "A sharded tensor has other dimensions than it was written with",
        where=f"{checkpoint.path}, {tensor.spec.name}",
        expected=f"a view as {list(saved_view)}",
        found=f"{list(lives)}",
        fix="Load this tensor unsharded.",
    )


def _synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for pending work on devices: the filling threads do not copy on the caller's stream."""
    for device in devices:
        torch.accelerator.synchronize(device)


def _check_covered(checkpoint: Checkpoint, target: Target, filled_bytes: int) -> None:
    if filled_bytes != target.box.numel:
        raise CheckpointError(
            "A checkpoint does not cover a tensor",
            where=f"{checkpoint.path}, {target.tensor.spec.name}",
            expected=f"{target.box.numel} B",
            found=f"{filled_bytes} B",
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a piece that goes to a target. Boxes are in bytes, in the dimensions of the tensor.

    Args:
        box: of the piece.
        common: of the part.
        first: start of the part's bytes in the packed piece; `last` is their end.
        memory: destination for a direct copy; None if the bytes are scattered in the piece or in live memory.
    """

    target: Target
    box: Box
    common: Box
    first: int
    last: int
    memory: Bytes | None

    @staticmethod
    def of(piece: WrittenPiece, target: Target, itemsize: int) -> _Part:
        """Return a target's part of a piece."""
        box = in_bytes(piece.box, itemsize)
        common = intersect(box, target.box)
        if common == box:
            return _Part(target, box, common, 0, box.numel, target.memory(box))
        packed = image(relative(common, box), box.shape, 1)
        memory = target.memory(common) if packed.is_contiguous else None
        return _Part(target, box, common, packed.start, packed.start + packed.extent, memory)

    def move(self, lo: int, data: Bytes, *, is_trial: bool) -> int:
        """Copy what belongs to the part of `data`, the packed piece's bytes from `lo` on; return the number of bytes.

        Args:
            is_trial: copy nothing.
        """
        at = filled = 0
        for inner in extent(self.box.shape, lo, lo + data.size):
            box = absolute(inner, self.box)
            common = intersect(box, self.common)
            if common.numel and not is_trial:
                array = data[at : at + box.numel].reshape(box.shape)
                self.target.put(common, array[relative(common, box).slices])
            at += box.numel
            filled += common.numel
        return filled


_Read = tuple[PieceBlock, _Part]


def _reads_of(checkpoint: Checkpoint, places: Mapping[str, Place], targets: Sequence[Target]) -> Iterator[_Read]:
    """Yield every block with a part of a target in the order of the files: columns of several pieces alternate."""
    for target in targets:
        place, reads = places[target.tensor.spec.name], list[_Read]()
        size, present = place.spec.dtype.itemsize, checkpoint.held(place.spec.name)
        for number, piece in checkpoint.manifest.tensors[place.spec.name].pieces_in(target.elements, size):
            if number not in present:
                raise not_held(checkpoint, place, number)
            part = _Part.of(piece, target, size)
            reads += [(block, part) for block in blocks_in(place, number, piece, begin=part.first, end=part.last)]
        yield from sorted(reads, key=_start_of)


def _start_of(read: _Read) -> int:
    """Return the offset of a block's first byte in its tensor."""
    block, _ = read
    return next(block.packed.spans(block.lo, block.hi))[0]


def _ranges(checkpoint: Checkpoint, reads: Iterable[_Read]) -> Iterator[tuple[Path, int, int]]:
    """Yield the byte ranges that are read, found by gathering blocks without a file."""
    gatherer, buffer, spans = Gatherer(), np.empty(BLOCK_BYTES, np.uint8), list[tuple[int, int]]()

    def note(part: memoryview, start: int) -> None:
        spans.append((start, start + part.nbytes))

    for block, _ in reads:
        gatherer.gather(note, block.packed, block.lo, buffer[: block.hi - block.lo], offset=block.place.offset)
        yield from ((checkpoint.path / block.place.file, start, end) for start, end in spans)
        spans.clear()


class _Queue:
    """Hands out blocks in file order to several threads, until it is empty or closed."""

    def __init__(self, reads: Iterator[_Read]) -> None:
        self._reads, self._number = reads, 0
        self._is_closed = False
        self._lock = threading.Lock()

    def take(self) -> tuple[int, _Read | None]:
        """Return a block and its number, which ascends; None if no block is left."""
        with self._lock:
            self._number += 1
            return self._number, None if self._is_closed else next(self._reads, None)

    def close(self) -> None:
        self._is_closed = True


class _Worker:
    """Fills or only verifies blocks on a thread of its own."""

    def __init__(self, checkpoint: Checkpoint, queue: _Queue, *, verify: bool, is_trial: bool, is_pinned: bool) -> None:
        self._checkpoint, self._queue, self._verify, self._is_trial = checkpoint, queue, verify, is_trial
        self._gatherer = Gatherer()
        memory = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self._buffer: Bytes = memory.numpy()
        self.number = 0
        self.read_bytes = self.filled_bytes = 0
        self.filled: Counter[Target] = Counter()

    def run(self) -> None:
        """Fill blocks in turn. A failing worker stops the others at their next block.

        Invariant: blocks are taken in order and finished, so the failure with the lowest `number` is the first in the
        files, regardless of thread timing.
        """
        try:
            for name, reads in itertools.groupby(self._take(), key=lambda read: read[0].place.file):
                with open_tensor_file(self._checkpoint.files, self._checkpoint.path / name) as file:
                    for block, part in reads:
                        self._fill(block, part, file)
                    self.read_bytes += file.read_bytes
        finally:
            self._queue.close()

    def _take(self) -> Iterator[_Read]:
        while True:
            self.number, read = self._queue.take()
            if read is None:
                return
            yield read

    def _fill(self, block: PieceBlock, part: _Part, file: OpenFile) -> None:
        data, is_direct = self._buffer[: block.hi - block.lo], False
        if part.memory is not None and part.first <= block.lo and block.hi <= part.last:
            is_direct = True
            data = data if self._is_trial else part.memory[block.lo - part.first : block.hi - part.first]
        block.read(self._checkpoint, file, self._gatherer, data, verify=self._verify)
        filled = data.size if is_direct else part.move(block.lo, data, is_trial=self._is_trial)
        self.filled[part.target] += filled
        self.filled_bytes += filled


def _run(
    workers: Sequence[_Worker], queue: _Queue, *, progress: Callable[[int, int], None] | None, total_bytes: int
) -> None:
    """Run workers on threads until all are done, and raise the first error in file order."""
    pool = Worker("checkpoint-reader", threads=len(workers))
    jobs = [pool.submit(worker.run) for worker in workers]
    try:
        for job in jobs:
            while not job.ends(PROGRESS_S):
                if progress is not None:
                    progress(sum(worker.filled_bytes for worker in workers), total_bytes)
    finally:
        queue.close()
        pool.close(_LEAVE_S)
    for _, job in sorted(zip((worker.number for worker in workers), jobs, strict=True), key=lambda found: found[0]):
        job.wait()


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
            local = self._staging = torch.empty(box.shape, dtype=local.dtype, device="cpu")
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
            overwrite(self.tensor.local, self._staging.reshape(self.tensor.local.shape))


def _bytes_of(local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the bytes of a tensor, in its own memory, as `shape`, whose last dimension is the bytes of an item."""
    size = local.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=local.device)
    strides = (*(stride * size for stride in local.stride()), 1)
    memory.set_(local.untyped_storage(), local.storage_offset() * size, (*local.shape, size), strides)
    return memory.view(shape)
