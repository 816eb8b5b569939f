"""Fills live tensors from a checkpoint, box by box, checking every block it touches. Choosing one is told elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.checkpoint.box import Box, image, intersect, relative, whole
from trainer.checkpoint.layout import Place, TensorSpec
from trainer.checkpoint.live import LiveTensor
from trainer.checkpoint.manifest import BLOCK_BYTES, DIGEST_BYTES, WrittenPiece
from trainer.checkpoint.reader import Checkpoint, check_block, opened
from trainer.checkpoint.snapshot import is_direct, memory_of
from trainer.errors import CheckpointError, MismatchError


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank loaded: `tensors` of `expected`, `read_bytes` from files, in `seconds`."""

    tensors: int
    expected: int
    read_bytes: int
    seconds: float


def check_tensors(specs: Sequence[TensorSpec], places: Mapping[str, Place], *, where: object) -> None:
    """Compare the tensors that are wanted with those that are there, all of them, before anything is copied.

    Raises:
        MismatchError: listing every missing or unexpected tensor and every other shape or dtype.
    """
    problems = []
    wanted = {spec.name: spec for spec in specs}
    kinds = {spec.kind for spec in specs}
    for name, spec in wanted.items():
        if name not in places:
            problems.append(f"{name} is missing")
            continue
        found = places[name].spec
        if found.shape != spec.shape:
            problems.append(f"{name} has shape {list(found.shape)}, the model has {list(spec.shape)}")
        if found.dtype != spec.dtype:
            problems.append(f"{name} has dtype {found.dtype}, the model has {spec.dtype}")
    problems += [f"{name} is unexpected" for name, p in places.items() if p.spec.kind in kinds and name not in wanted]
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise MismatchError("The checkpoint's tensors are not the model's", where=where, found=shown)


def fill(
    checkpoint: Checkpoint, places: Mapping[str, Place], live: Sequence[LiveTensor], *, verify: bool = True
) -> LoadReport:
    """Read every box of `live` from the checkpoint into its live memory, verifying each block that is touched.

    Raises:
        CheckpointError: for a damaged block, naming file, tensor and bytes. What was filled before stays filled.
        MismatchError: for a shard of a tensor that was written in other dimensions.
    """
    start, read_bytes, filled = time.perf_counter(), 0, 0
    for file, members in _by_file(live, places).items():
        with opened(checkpoint, checkpoint.path / file) as descriptor:
            for tensor in members:
                filler = _Filler(checkpoint, places[tensor.spec.name], descriptor, verify)
                read_bytes += filler.fill(tensor)
                filled += 1
    return LoadReport(filled, len(live), read_bytes, time.perf_counter() - start)


def _by_file(live: Sequence[LiveTensor], places: Mapping[str, Place]) -> dict[str, list[LiveTensor]]:
    files: dict[str, list[LiveTensor]] = {}
    for tensor in sorted(live, key=lambda t: (places[t.spec.name].file, places[t.spec.name].offset)):
        files.setdefault(places[tensor.spec.name].file, []).append(tensor)
    return files


@dataclass(frozen=True, slots=True)
class _Filler:
    """Fills one live tensor from an open file."""

    checkpoint: Checkpoint
    place: Place
    descriptor: int
    verify: bool

    def fill(self, tensor: LiveTensor) -> int:
        """Return how many bytes were read."""
        if tensor.box.numel == 0:
            return 0
        box = self._box_of(tensor)
        direct = is_direct(tensor.local)
        staging = tensor.local if direct else torch.empty(tensor.box.shape, dtype=tensor.local.dtype)
        memory, read_bytes, covered = memory_of(staging), 0, 0
        for piece in self.checkpoint.manifest.tensors[self.place.spec.name].pieces(self._itemsize):
            common = intersect(piece.box, box)
            if common.numel:
                read, copied = self._fill_from(piece, box, common, memory)
                read_bytes, covered = read_bytes + read, covered + copied
        if covered != memory.nbytes:
            raise CheckpointError(
                "A checkpoint does not cover a tensor",
                where=f"{self.checkpoint.path}, {self.place.spec.name}",
                expected=f"{memory.nbytes} B",
                found=f"{covered} B",
            )
        if not direct:
            with torch.no_grad():
                tensor.local.copy_(staging)
        return read_bytes

    def _box_of(self, tensor: LiveTensor) -> Box:
        """Return a tensor's box in the dimensions in which it was written; a whole tensor may live in others."""
        written, lives = self.place.spec.view, tensor.spec.view
        if lives == written:
            return tensor.box
        if tensor.box == whole(lives):
            return whole(written)
        raise MismatchError(
            "A tensor was written in other dimensions than its shard lives in",
            where=f"{self.checkpoint.path}, {self.place.spec.name}",
            expected=f"a view as {list(written)}",
            found=f"{list(lives)}",
            fix="Load it whole.",
        )

    @property
    def _itemsize(self) -> int:
        return self.place.spec.dtype.itemsize

    def _fill_from(self, piece: WrittenPiece, box: Box, common: Box, memory: memoryview) -> tuple[int, int]:
        """Copy `common`, a part of `piece`, into `memory`, the packed image of `box`; return bytes read and copied."""
        moves = _Moves.of(piece.box, box, common=common, itemsize=self._itemsize)
        read_bytes = copied = 0
        for number, lo in enumerate(range(piece.lo, piece.hi, BLOCK_BYTES)):
            hi = min(lo + BLOCK_BYTES, piece.hi)
            parts = list(moves.within(lo, hi))
            if not parts:
                continue
            whole_block = len(parts) == 1 and parts[0][0] == lo and parts[0][2] == hi - lo
            target = parts[0][1] if whole_block else 0
            block = memory[target : target + hi - lo] if whole_block else memoryview(bytearray(hi - lo))
            self._read(piece, lo, block)
            if self.verify:
                digest = piece.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                check_block(self.checkpoint, self.place, block, digest=digest, at=(lo, hi))
            read_bytes += hi - lo
            copied += sum(length for _, _, length in parts)
            if not whole_block:
                for source, target, length in parts:
                    memory[target : target + length] = block[source - lo : source - lo + length]
        return read_bytes, copied

    def _read(self, piece: WrittenPiece, lo: int, block: memoryview) -> None:
        spans = image(piece.box, self.place.spec.view, self._itemsize).spans(lo, lo + block.nbytes)
        for in_tensor, in_image, length in spans:
            target = block[in_image - lo : in_image - lo + length]
            if self.checkpoint.files.read(self.descriptor, target, offset=self.place.offset + in_tensor) != length:
                raise CheckpointError("A file ended early", where=self.checkpoint.path / self.place.file)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Runs of equal length that go from one packed image to another: `sources` rise, `targets` belong to them."""

    sources: np.ndarray
    targets: np.ndarray
    length: int

    @staticmethod
    def of(source: Box, target: Box, *, common: Box, itemsize: int) -> _Moves:
        """Describe how `common` moves from the packed image of box `source` to that of box `target`."""
        come = image(relative(common, source), source.shape, itemsize)
        go = image(relative(common, target), target.shape, itemsize)
        length = min(come.run_bytes, go.run_bytes)
        return _Moves(
            _starts(come.spans(0, come.total_bytes), length), _starts(go.spans(0, go.total_bytes), length), length
        )

    def within(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """Yield `(source, target, length)` of what lies in bytes `[lo, hi)` of the source."""
        first = max(0, int(np.searchsorted(self.sources, lo, side="right")) - 1)
        for at in range(first, len(self.sources)):
            source, target = int(self.sources[at]), int(self.targets[at])
            if source >= hi:
                break
            skip = max(0, lo - source)
            length = min(self.length, hi - source) - skip
            if length > 0:
                yield source + skip, target + skip, length


def _starts(spans: Iterator[tuple[int, int, int]], length: int) -> np.ndarray:
    """Return where runs of `length` bytes start, given spans that are multiples of it."""
    return np.concatenate([np.arange(start, start + size, length) for start, _, size in spans])
