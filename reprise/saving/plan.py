"""Plans a rank's saves: which bytes it writes, and in which chunks. A plan is reused until a tensor moves.

Each tensor byte is written by exactly one rank. Ranks with the same box are replicas. They lay their common boxes end
to end, and each rank takes an equal share. So the load is balanced to within a page for any replica count, and each
rank writes long runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from reprise.commit.joint_plan import encode
from reprise.format.box import Image
from reprise.format.layout import PAGE_BYTES, Layout, Place, build_layout
from reprise.format.manifest import Piece
from reprise.saving.policy import SavePolicy
from reprise.tensors.dtypes import stored_dtype
from reprise.tensors.file_aligned import zeros_like_files
from reprise.tensors.live import Contents, LiveTensor, storages_of
from reprise.tensors.memory import Memory, await_training
from reprise.tensors.modes import own_modes

# Files are written in extents about this long, several concurrently.
EXTENT_BYTES = 128 << 20
# An optimizer step during a save waits for each thread's current chunk, so chunks are small.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Bytes `[lo, hi)` in the packed image of a piece's box."""

    piece: Piece
    lo: int
    hi: int


@dataclass(slots=True)
class Chunk:
    """Parts read and written together: `size` bytes, contiguous in a file unless `strided`.

    Args:
        offset: The file offset.
        strided: None for contiguous bytes. Otherwise the chunk has a single part, whose rows are not contiguous in the
            tensor; `offset` is the tensor's file offset, and `strided` is the image of the part's box.
    """

    offset: int
    size: int
    parts: list[ChunkPart]
    strided: Image | None = None


def cut(pieces: Sequence[Piece], holdings: Sequence[Holding]) -> dict[str, list[list[Chunk]]]:
    """Cut `pieces` into chunks, by file and in file order, grouped into extents with whole pieces.

    Adjacent pieces share chunks. Chunks end at multiples of CHUNK_BYTES in the file, except where an extent or a
    contiguous run ends.
    """
    held = {holding.place.spec.name: holding for holding in holdings}
    starts = list[tuple[str, int, Image | None, Piece]]()  # with the image if rows are not contiguous in the file
    for piece in pieces:
        place, image = held[piece.name].place, held[piece.name].image
        shape, first, _ = next(image.boxes(piece.lo, piece.hi))
        starts.append((place.file, place.offset + first, image if shape[-1] < piece.hi - piece.lo else None, piece))
    chunks, room = dict[str, list[list[Chunk]]](), 0
    for file, start, packed, piece in sorted(starts, key=itemgetter(0, 1)):
        extents = chunks.setdefault(file, [])
        if not extents or room <= 0:
            extents.append([])
            room = EXTENT_BYTES
        room -= piece.hi - piece.lo
        extent, first = extents[-1], piece.lo + CHUNK_BYTES - (0 if packed else start % CHUNK_BYTES)
        for lo, hi in itertools.pairwise([piece.lo, *range(first, piece.hi, CHUNK_BYTES), piece.hi]):
            last, part = extent[-1] if extent and not packed else None, ChunkPart(piece, lo, hi)
            if last and not last.strided and last.offset + last.size == start and start % CHUNK_BYTES:
                last.parts.append(part)
                last.size += hi - lo
            else:
                offset = held[piece.name].place.offset if packed else start
                extent.append(Chunk(offset, hi - lo, [part], packed))
            start += hi - lo
    return chunks


# A smaller tensor goes whole to a single replica: splitting it would cost more than the imbalance.
SMALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Holding:
    """A box held by a rank: `place` is the tensor's, `replicas` all ranks with this box."""

    place: Place
    image: Image
    replicas: tuple[int, ...]


class Plan:
    """A rank's saves of a set of live tensors: which bytes it writes, and the memory with these bytes. Main thread.

    Attributes:
        live: The tensors to save. Under the policy `dtype` their copies, which `begin` fills.
        replicated: Those also held by other ranks.
        optimizers: The optimizers whose steps may change them during a save.
        pieces: What this rank writes.
        table: These pieces; see `joint_plan.encode`.
        chunks: Chunks by file, in extents for concurrent writing. Each rank starts with another file, so ranks do not
            queue for the same file.
        order: All chunks in approximate write order.
        columns: The pieces whose rows are not contiguous in their file.
        devices: The devices with tensors to save.
        staging_bytes: The size of the memory for copies of what training may overtake.
    """

    def __init__(self, contents: Contents, policy: SavePolicy, rank: int) -> None:
        self._contents, specs, dtype = contents, contents.specs, policy.dtype
        if dtype is not None:
            specs = tuple(replace(spec, dtype=stored_dtype(dtype, where=spec.name)) for spec in specs)
        self.layout = build_layout(specs, file_bytes=policy.file_bytes)
        self.live = self._originals = [tensor for tensor in contents.live if not tensor.is_copy]
        if dtype is not None:
            self.live = _empty_casts(self._originals, self.layout, dtype)
        self.replicated = [tensor for tensor in self.live if len(tensor.replicas) > 1]
        is_overtaken = policy.async_save and dtype is None
        self.optimizers = contents.optimizers if is_overtaken else ()
        places = [self.layout.places[tensor.spec.name] for tensor in self.live]
        held = [Holding(p, p.spec.image(t.box), t.replicas) for p, t in zip(places, self.live, strict=True)]
        self.pieces = pieces_of(held, rank)
        self.table = encode(self.pieces, self.layout)
        names = {piece.name for piece in self.pieces}
        self.devices = {tensor.local.device for tensor in self.live if tensor.local.device.type != "cpu"}
        files = deque(cut(self.pieces, held).items())
        files.rotate(-rank)
        self.chunks = dict(files)
        self.order = [chunk for extents in self.chunks.values() for extent in extents for chunk in extent]
        self.columns = [*dict.fromkeys(chunk.parts[0].piece for chunk in self.order if chunk.strided)]
        # Other tensors may change at any time, and are copied as a save begins.
        is_steady = policy.copies_at_call or not is_overtaken
        steady = None if is_steady else storages_of(self.optimizers, contents.constant)
        self._steady, self._copied = dict[str, Memory](), list[LiveTensor]()
        for tensor in self.live:
            local = tensor.local.detach()
            if tensor.spec.name not in names:
                continue
            if local.is_contiguous() and (steady is None or local.untyped_storage().data_ptr() in steady):
                self._steady[tensor.spec.name] = Memory(local, is_private=False)
            else:
                self._copied.append(tensor)
        total_bytes = sum(chunk.size + PAGE_BYTES for chunk in self.order) if is_overtaken else 0
        limit = policy.staging_bytes
        self.staging_bytes = total_bytes if limit is None else min(limit, total_bytes)

    def suits(self, contents: Contents) -> bool:
        """Return whether `contents` has the very same tensors as this plan."""
        is_same = self._contents.specs is contents.specs and self._contents.live is contents.live
        return is_same and self._contents.optimizers == contents.optimizers

    def begin(self) -> dict[str, Memory]:
        """Return the memory with the tensors' current values, by name. No save may be under way."""
        if self.live is not self._originals:
            with torch.no_grad():
                for source, target in zip(self._originals, self.live, strict=True):
                    target.local.copy_(source.local)
        copies: dict[str, Memory] = {}
        for tensor in self._copied:
            packed = tensor.local.detach().clone(memory_format=torch.contiguous_format)
            copies[tensor.spec.name] = Memory(packed, is_private=True)
        await_training(self.devices)
        return {**self._steady, **copies}


@own_modes()
def _empty_casts(live: Sequence[LiveTensor], layout: Layout, dtype: torch.dtype) -> list[LiveTensor]:
    """Return tensors for casts to `dtype`, in host memory laid out as in the files where rows are contiguous there."""
    empty = [torch.empty(tensor.box.shape, dtype=dtype, device="cpu") for tensor in live]
    aligned = zeros_like_files(zip(live, empty, strict=True), ("",), layout)
    return [
        replace(tensor, local=aligned.get(tensor.spec.name, memory)) for tensor, memory in zip(live, empty, strict=True)
    ]


def pieces_of(holdings: Sequence[Holding], rank: int) -> list[Piece]:
    """Return the pieces written by `rank`.

    A pure function. Replicas agree: each sees the same common boxes in the same order, whatever else it holds.
    """
    groups = defaultdict[tuple[int, ...], list[Holding]](list)
    for holding in holdings:
        if holding.image.total_bytes:
            groups[holding.replicas].append(holding)
    pieces = []
    for replicas, members in groups.items():
        starts = [0, *itertools.accumulate(holding.image.total_bytes for holding in members)]
        index, count = replicas.index(rank), len(replicas)
        first, last = (_boundary(members, starts, index=at, count=count) for at in (index, index + 1))
        for holding, start in zip(members, starts, strict=False):
            lo, hi = max(first - start, 0), min(last - start, holding.image.total_bytes)
            if lo < hi:
                pieces.append(Piece(holding.place.spec.name, holding.image.box, lo, hi))
    return pieces


def _boundary(members: list[Holding], starts: list[int], *, index: int, count: int) -> int:
    """Return where share `index` starts, rounded down to a file page, a row, or a small tensor's start."""
    target = starts[-1] * index // count
    if target == starts[-1]:
        return target
    at = bisect_right(starts, target) - 1
    holding, inside = members[at], target - starts[at]
    if holding.image.total_bytes < SMALL_BYTES:
        return starts[at]
    if holding.image.is_contiguous:
        in_file = holding.place.offset + holding.image.start
        return starts[at] + max(0, (in_file + inside) // PAGE_BYTES * PAGE_BYTES - in_file)
    return starts[at] + inside // holding.image.run_bytes * holding.image.run_bytes
