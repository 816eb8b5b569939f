"""Plans a rank's saves: which bytes it writes, and in which chunks. A plan is reused until a tensor moves.

Each tensor byte is written by exactly one rank. Ranks with the same box are replicas. They lay their common boxes end
to end, and each rank takes an equal share. So the load is balanced to within a page for any replica count, and each
rank writes long runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reprise.format.box import Box, Image
from reprise.format.layout import PAGE_BYTES, Layout, build_layout
from reprise.tensors.live import Contents, LiveTensor, storages_of
from reprise.tensors.memory import Sources

# Files are written in extents about this long, several concurrently.
EXTENT_BYTES = 128 << 20
# An optimizer step during a save waits for each thread's current chunk, so chunks are small.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[lo, hi)` in the packed image of `box`, written by a single rank: the whole box or a part."""

    name: str
    box: Box
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Bytes `[lo, hi)` in the packed image of a piece's box."""

    piece: Piece
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parts read and written together: `size` bytes, contiguous in a file unless `strided`.

    Args:
        offset: The file offset.
        strided: None for contiguous bytes. Otherwise the chunk has a single part, whose rows are not contiguous in the
            tensor; `offset` is the tensor's file offset, and `strided` is the image of the part's box.
    """

    file: str
    offset: int
    size: int
    parts: tuple[ChunkPart, ...]
    strided: Image | None = None


def cut(pieces: Sequence[Piece], layout: Layout) -> dict[str, list[list[Chunk]]]:
    """Cut `pieces` into chunks, by file and in file order, grouped into extents with whole pieces.

    Adjacent pieces share chunks. Chunks end on page boundaries, except where an extent or a contiguous run ends.
    """
    chunks: dict[str, list[list[Chunk]]] = {}
    for name, run in itertools.groupby(sorted(map(_Placed.of, pieces, itertools.repeat(layout))), lambda p: p.file):
        chunks[name] = [list(_cut_extent(name, extent)) for extent in _extents(list(run))]
    return chunks


@dataclass(frozen=True, slots=True, order=True)
class _Placed:
    """A piece placed in its file: `offset` is its first byte's file offset, `tensor` its tensor's."""

    file: str
    offset: int
    tensor: int
    piece: Piece
    image: Image
    is_contiguous: bool

    @staticmethod
    def of(piece: Piece, layout: Layout) -> _Placed:
        place = layout.places[piece.name]
        packed = place.spec.image(piece.box)
        first, _, length = next(packed.spans(piece.lo, piece.hi))
        is_contiguous = length == piece.hi - piece.lo
        return _Placed(place.file, place.offset + first, place.offset, piece, packed, is_contiguous)


def _extents(placed: list[_Placed]) -> Iterator[list[_Placed]]:
    extent, size = list[_Placed](), 0
    for item in placed:
        extent.append(item)
        size += item.piece.hi - item.piece.lo
        if size >= EXTENT_BYTES:
            yield extent
            extent, size = [], 0
    if extent:
        yield extent


def _cut_extent(name: str, placed: list[_Placed]) -> Iterator[Chunk]:
    parts, start, end = list[ChunkPart](), 0, 0
    for item in placed:
        if parts and (not item.is_contiguous or item.offset != end):
            yield Chunk(name, start, end - start, tuple(parts))
            parts = []
        piece = item.piece
        if not item.is_contiguous:
            for lo in range(piece.lo, piece.hi, CHUNK_BYTES):
                hi = min(lo + CHUNK_BYTES, piece.hi)
                yield Chunk(name, item.tensor, hi - lo, (ChunkPart(piece, lo, hi),), item.image)
            continue
        if not parts:
            start = end = item.offset
        lo = piece.lo
        while lo < piece.hi:
            hi = min(piece.hi, lo + _room(start, end))
            parts.append(ChunkPart(piece, lo, hi))
            end += hi - lo
            lo = hi
            if not _room(start, end):
                yield Chunk(name, start, end - start, tuple(parts))
                parts, start = [], end
    if parts:
        yield Chunk(name, start, end - start, tuple(parts))


def _room(start: int, end: int) -> int:
    """Return how many bytes still fit into a chunk from `start` to `end`, up to its last page boundary."""
    return (start + CHUNK_BYTES) // PAGE_BYTES * PAGE_BYTES - end


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
        columns: The pieces whose rows are not contiguous in their file.
        is_overtaken: Whether the program changes tensors during the save.
    """

    contents: Contents
    layout: Layout
    pieces: list[Piece]
    chunks: dict[str, list[list[Chunk]]]
    columns: list[Piece]
    sources: Sources
    is_overtaken: bool = False

    def suits(self, contents: Contents) -> bool:
        """Return whether `contents` has the very same tensors as this plan."""
        is_same = self.contents.specs is contents.specs and self.contents.live is contents.live
        return is_same and self.contents.optimizers == contents.optimizers

    @property
    def saved(self) -> tuple[LiveTensor, ...]:
        """Return the live tensors, without copies whose originals other ranks save."""
        return tuple(tensor for tensor in self.contents.live if not tensor.is_copy)

    @property
    def order(self) -> list[Chunk]:
        """Return the chunks in approximate write order."""
        return [chunk for extents in self.chunks.values() for extent in extents for chunk in extent]

    @property
    def staging_bytes(self) -> int:
        """Return how many bytes a copy of every chunk needs."""
        return sum(chunk.size + PAGE_BYTES for chunk in self.order)


def make_plan(
    contents: Contents, *, rank: int, file_bytes: int, is_overtaken: bool, copies_at_call: bool = False
) -> Plan:
    """Plan saves for `contents`.

    Args:
        is_overtaken: Whether the program changes tensors during the save. Otherwise all memory stays unchanged until
            the save ends.
        copies_at_call: Whether all memory stays unchanged until the snapshot is released. Otherwise only memory changed
            by steps in `contents.optimizers`, or declared constant, does.
    """
    layout = build_layout(contents.specs, file_bytes=file_bytes)
    pieces = plan(contents.live, layout, rank)
    names = {piece.name for piece in pieces}
    is_steady = copies_at_call or not is_overtaken
    steady = None if is_steady else storages_of(contents.optimizers, contents.constant)
    chunks = cut(pieces, layout)
    turn = rank % max(1, len(chunks))
    chunks = dict([*chunks.items()][turn:] + [*chunks.items()][:turn])
    return Plan(
        contents=contents,
        layout=layout,
        pieces=pieces,
        chunks=chunks,
        columns=columns_of(chunks),
        sources=Sources([t for t in contents.live if t.spec.name in names and not t.is_copy], steady),
        is_overtaken=is_overtaken,
    )


def columns_of(chunks: Mapping[str, Sequence[Sequence[Chunk]]]) -> list[Piece]:
    """Return the pieces whose rows are not contiguous in their file."""
    extents = itertools.chain(*chunks.values())
    return list({chunk.parts[0].piece: None for chunk in itertools.chain(*extents) if chunk.strided is not None})


def plan(live: Sequence[LiveTensor], layout: Layout, rank: int) -> list[Piece]:
    """Return the pieces written by `rank`."""
    holdings = [
        Holding(spec.name, spec.image(tensor.box), layout.places[spec.name].offset, tensor.replicas)
        for tensor in live
        if not tensor.is_copy
        for spec in (tensor.spec,)
    ]
    return pieces_of(holdings, rank)


def pieces_of(holdings: Sequence[Holding], rank: int) -> list[Piece]:
    """Return the pieces written by `rank`, in the same order as `holdings`.

    A pure function. Replicas agree: each sees the same common boxes in the same order, whatever else it holds.
    """
    by_name: dict[str, Piece] = {}
    for replicas, members in _groups(holdings).items():
        for piece in _share(members, index=replicas.index(rank), count=len(replicas)):
            by_name[piece.name] = piece
    return [by_name[holding.name] for holding in holdings if holding.name in by_name]


def _groups(holdings: Sequence[Holding]) -> dict[tuple[int, ...], list[Holding]]:
    """Group non-empty holdings by the ranks sharing them."""
    groups: dict[tuple[int, ...], list[Holding]] = defaultdict(list)
    for holding in holdings:
        if holding.image.total_bytes:
            groups[holding.replicas].append(holding)
    return groups


def _share(members: list[Holding], *, index: int, count: int) -> list[Piece]:
    starts = [0, *itertools.accumulate(holding.image.total_bytes for holding in members)]
    first = _boundary(members, starts, index=index, count=count)
    last = _boundary(members, starts, index=index + 1, count=count)
    if first == last:
        return []
    pieces = []
    for at in range(bisect_right(starts, first) - 1, bisect_left(starts, last)):
        lo, hi = max(first, starts[at]) - starts[at], min(last, starts[at + 1]) - starts[at]
        pieces.append(Piece(members[at].name, members[at].image.box, lo, hi))
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
        in_file = holding.offset + next(holding.image.spans(0, 1))[0]
        return starts[at] + max(0, (in_file + inside) // PAGE_BYTES * PAGE_BYTES - in_file)
    return starts[at] + inside // holding.image.run_bytes * holding.image.run_bytes
