"""Cuts a rank's pieces into chunks, the unit of reading, digesting and writing. Pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from reprise.format.box import Box, Image
from reprise.format.layout import PAGE_BYTES, Layout
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES

# A file is written in extents of about this size, several concurrently.
EXTENT_BYTES = 128 << 20
# An optimizer step during a save waits for the chunk that each thread is writing, so a chunk is small.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[lo, hi)` of the packed image of `box`, written by one rank: a whole box or a part of it."""

    name: str
    box: Box
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Bytes `[lo, hi)` of the packed image of a piece's box."""

    piece: Piece
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parts that are read and written together, `size` contiguous bytes of one file.

    Args:
        offset: the offset in the file.
        strided: None for contiguous bytes. Otherwise the chunk has one part, its rows are not contiguous in the
            tensor, `offset` is the start of the tensor, and `strided` is the image of the part's box.
    """

    file: str
    offset: int
    size: int
    parts: tuple[ChunkPart, ...]
    strided: Image | None = None


def cut(pieces: Sequence[Piece], layout: Layout) -> dict[str, list[list[Chunk]]]:
    """Return the chunks of `pieces` by file, in file order, grouped into extents of whole pieces.

    Adjacent pieces share chunks. Chunks end on page boundaries, except at the end of an extent or of a contiguous run.
    """
    chunks: dict[str, list[list[Chunk]]] = {}
    for name, run in itertools.groupby(sorted(map(_Placed.of, pieces, itertools.repeat(layout))), lambda p: p.file):
        chunks[name] = [list(_cut_extent(name, extent)) for extent in _extents(list(run))]
    return chunks


@dataclass(frozen=True, slots=True, order=True)
class _Placed:
    """A piece with the file offset of its first byte; `tensor` is the file offset of its tensor."""

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
    """Return the bytes that still fit into a chunk from `start` to `end` before it ends on a page boundary."""
    return (start + CHUNK_BYTES) // PAGE_BYTES * PAGE_BYTES - end


class PieceDigests:
    """Computes the digests of pieces whose bytes are added in order, one piece after the other."""

    def __init__(self) -> None:
        self._found: dict[str, list[bytes]] = {}
        self._open = xxhash.xxh3_64()

    def add(self, part: ChunkPart, data: memoryview) -> None:
        """Digest the bytes of the next part."""
        at, end = part.lo - part.piece.lo, part.piece.hi - part.piece.lo
        digests = self._found.setdefault(part.piece.name, [])
        while data.nbytes:
            room = BLOCK_BYTES - at % BLOCK_BYTES
            block, data = data[:room], data[room:]
            self._open.update(block)
            at += block.nbytes
            if at % BLOCK_BYTES == 0 or at == end:
                digests.append(self._open.intdigest().to_bytes(DIGEST_BYTES, "big"))
                self._open.reset()

    def all(self) -> dict[str, bytes]:
        """Return the digests of each piece's blocks, packed, by name."""
        return {name: b"".join(digests) for name, digests in self._found.items()}
