"""Plans a rank's saves: which bytes it writes, and in which chunks. A plan is reused until a tensor moves.

Each tensor byte is written by exactly one rank. Ranks with the same box are replicas. They lay their common boxes end
to end, and each rank takes an equal share. So the load is balanced to within a page for any replica count, and each
rank writes long runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter

from reprise.format.box import Image
from reprise.format.layout import PAGE_BYTES, Layout, build_layout
from reprise.format.manifest import Piece
from reprise.tensors.live import Contents
from reprise.tensors.memory import Sources

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


def cut(pieces: Sequence[Piece], layout: Layout) -> dict[str, list[list[Chunk]]]:
    """Cut `pieces` into chunks, by file and in file order, grouped into extents with whole pieces.

    Adjacent pieces share chunks. Chunks end at multiples of CHUNK_BYTES in the file, except where an extent or a
    contiguous run ends.
    """
    starts, chunks, room = [(*_placed(piece, layout), piece) for piece in pieces], dict[str, list[list[Chunk]]](), 0
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
                offset = layout.places[piece.name].offset if packed else start
                extent.append(Chunk(offset, hi - lo, [part], packed))
            start += hi - lo
    return chunks


def _placed(piece: Piece, layout: Layout) -> tuple[str, int, Image | None]:
    """Return a piece's file, its first byte's offset there, and the image of a box whose rows are not contiguous."""
    place = layout.places[piece.name]
    packed = place.spec.image(piece.box)
    first, _, length = next(packed.spans(piece.lo, piece.hi))
    return place.file, place.offset + first, packed if length < piece.hi - piece.lo else None


# A smaller tensor goes whole to a single replica: splitting it would cost more than the imbalance.
SMALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Holding:
    """A box held by a rank: `offset` is the tensor's file offset, `replicas` all ranks with this box."""

    name: str
    image: Image
    offset: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known about a save before it starts. Later saves reuse it for the same tensors.

    Args:
        chunks: Chunks by file, in extents for concurrent writing. Each rank starts with another file, so ranks do not
            queue for the same file.
    """

    contents: Contents
    layout: Layout
    pieces: list[Piece]
    chunks: dict[str, list[list[Chunk]]]
    sources: Sources

    def suits(self, contents: Contents) -> bool:
        """Return whether `contents` has the very same tensors as this plan."""
        is_same = self.contents.specs is contents.specs and self.contents.live is contents.live
        return is_same and self.contents.optimizers == contents.optimizers

    @property
    def order(self) -> list[Chunk]:
        """Return the chunks in approximate write order."""
        return [chunk for extents in self.chunks.values() for extent in extents for chunk in extent]

    @property
    def columns(self) -> list[Piece]:
        """Return the pieces whose rows are not contiguous in their file."""
        return [*dict.fromkeys(chunk.parts[0].piece for chunk in self.order if chunk.strided)]


def make_plan(contents: Contents, *, rank: int, file_bytes: int, steady: Collection[int] | None) -> Plan:
    """Plan saves for `contents`.

    Args:
        steady: Addresses of storages that stay unchanged until the snapshot is released. None means all.
    """
    layout = build_layout(contents.specs, file_bytes=file_bytes)
    live = [t for t in contents.live if not t.is_copy]
    holdings = [Holding(t.spec.name, t.spec.image(t.box), layout.places[t.spec.name].offset, t.replicas) for t in live]
    pieces = pieces_of(holdings, rank)
    names = {piece.name for piece in pieces}
    files = deque(cut(pieces, layout).items())
    files.rotate(-rank)
    sources = Sources([t for t in live if t.spec.name in names], steady)
    return Plan(contents, layout, pieces, dict(files), sources)


def pieces_of(holdings: Sequence[Holding], rank: int) -> list[Piece]:
    """Return the pieces written by `rank`, in the same order as `holdings`.

    A pure function. Replicas agree: each sees the same common boxes in the same order, whatever else it holds.
    """
    groups = defaultdict[tuple[int, ...], list[Holding]](list)
    for holding in holdings:
        if holding.image.total_bytes:
            groups[holding.replicas].append(holding)
    by_name: dict[str, Piece] = {}
    for replicas, members in groups.items():
        starts = [0, *itertools.accumulate(holding.image.total_bytes for holding in members)]
        index, count = replicas.index(rank), len(replicas)
        first, last = (_boundary(members, starts, index=at, count=count) for at in (index, index + 1))
        for holding, start in zip(members, starts, strict=False):
            lo, hi = max(first - start, 0), min(last - start, holding.image.total_bytes)
            if lo < hi:
                by_name[holding.name] = Piece(holding.name, holding.image.box, lo, hi)
    return [by_name[holding.name] for holding in holdings if holding.name in by_name]


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
        in_file = holding.offset + holding.image.start
        return starts[at] + max(0, (in_file + inside) // PAGE_BYTES * PAGE_BYTES - in_file)
    return starts[at] + inside // holding.image.run_bytes * holding.image.run_bytes
