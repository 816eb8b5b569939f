"""A rank's report on its share of a save: the digests of its inventory and of its blocks, or the reason it failed.

The table of its pieces changes only with the tensors. A report has the table's digest, and the table where rank 0 may
not have it; see `PieceTables`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from reprise.format.box import Box
from reprise.format.layout import Layout
from reprise.format.manifest import DIGEST_BYTES, WrittenPiece

# Has failed, iteration, identity, bytes written, groups of replicas, digest and length of the table of pieces.
_HEAD = struct.Struct("<?QQQIQI")
_GROUP = struct.Struct("<QIQQ")
# Of a table: the tensor's number, dimensions, first and last byte, blocks; offset and shape follow, eight bytes each.
PIECE = struct.Struct("<IBQQI")


@dataclass(frozen=True, slots=True)
class GroupDigest:
    """Digests (xxh3-64) of everything replicated by this rank and a group of ranks.

    Args:
        ranks: digest of the group's rank numbers, this rank included.
        size: number of ranks in the group.
        boxes: digest of the names and boxes of the tensors.
        content: digest of the tensors' bytes when the save began.
    """

    ranks: int
    size: int
    boxes: int
    content: int

    def to_bytes(self) -> bytes:
        """Return the row of a message."""
        return _GROUP.pack(self.ranks, self.size, self.boxes, self.content)

    @staticmethod
    def all_of(rows: bytes) -> tuple[GroupDigest, ...]:
        """Return the groups in a message."""
        return tuple(GroupDigest(*row) for row in _GROUP.iter_unpack(rows))


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's report to rank 0 about an attempt.

    Args:
        identity: digest of the inventory of all tensors of the checkpoint, as this rank sees it; see `Inventory`.
            0 where its part failed.
        problem: the reason why this rank failed, or None.
        written_bytes: bytes written by this rank, without headers.
        pieces: digest of the table of its pieces, in the form of `encode`.
        table: the table itself, compressed; empty if it is not sent.
        digests: the digests of all blocks of its pieces, in the order of the table.
    """

    iteration: int
    identity: int = 0
    groups: tuple[GroupDigest, ...] = ()
    problem: str | None = None
    written_bytes: int = 0
    pieces: int = 0
    table: bytes = b""
    digests: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the serialized report."""
        has_failed = self.problem is not None
        head = _HEAD.pack(
            has_failed,
            self.iteration,
            self.identity,
            self.written_bytes,
            len(self.groups),
            self.pieces,
            len(self.table),
        )
        rows = b"".join(group.to_bytes() for group in self.groups)
        return head + rows + (self.table + self.digests if self.problem is None else self.problem.encode())

    @staticmethod
    def from_bytes(data: bytes) -> RankReport:
        """Return the report in a message."""
        has_failed, iteration, identity, written_bytes, count, pieces, length = _HEAD.unpack_from(data)
        at = _HEAD.size + count * _GROUP.size
        groups = GroupDigest.all_of(data[_HEAD.size : at])
        if has_failed:
            return RankReport(iteration, identity, groups, data[at:].decode())
        end = at + length
        return RankReport(iteration, identity, groups, None, written_bytes, pieces, data[at:end], data[end:])


def digest_of_table(table: bytes) -> int:
    """Return the digest (xxh3-64) of a table of pieces."""
    return xxhash.xxh3_64_intdigest(table)


def encode(pieces: Sequence[WrittenPiece], layout: Layout) -> bytes:
    """Return the table of pieces: the tensor's number in the layout, dimensions, byte range, count of blocks, box."""
    numbers = {name: number for number, name in enumerate(layout.places)}
    parts = []
    for piece in pieces:
        dims = len(piece.box.offset)
        count = len(piece.digests) // DIGEST_BYTES
        parts.append(PIECE.pack(numbers[piece.name], dims, piece.lo, piece.hi, count))
        parts.append(struct.pack(f"<{2 * dims}Q", *piece.box.offset, *piece.box.shape))
    return b"".join(parts)


def decode(table: bytes, digests: bytes, layout: Layout) -> list[WrittenPiece]:
    """Return the pieces given to `encode`, for the same layout, with the digests of all their blocks in order.

    A piece lacks digests if there are too few.
    """
    names = list(layout.places)
    pieces, at, begin = [], 0, 0
    while at < len(table):
        number, dims, lo, hi, count = PIECE.unpack_from(table, at)
        at += PIECE.size
        numbers = struct.unpack_from(f"<{2 * dims}Q", table, at)
        at += 16 * dims
        end = begin + count * DIGEST_BYTES
        pieces.append(WrittenPiece(names[number], Box(numbers[:dims], numbers[dims:]), lo, hi, digests[begin:end]))
        begin = end
    return pieces


def block_count_of(table: bytes) -> int:
    """Return how many blocks the pieces of a table have."""
    count, at = 0, 0
    while at < len(table):
        _, dims, _, _, blocks = PIECE.unpack_from(table, at)
        at += PIECE.size + 16 * dims
        count += blocks
    return count
