"""A rank's report on its share of a save: the digest of its inventory, and its pieces or the reason it failed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from reprise.format.box import Box
from reprise.format.layout import Layout
from reprise.format.manifest import DIGEST_BYTES, WrittenPiece

_HEAD = struct.Struct("<?QQQI")  # has failed, iteration, identity, bytes written, groups of replicas
_GROUP = struct.Struct("<QIQQ")
_PIECE = struct.Struct("<IBQQI")


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


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's report to rank 0 about an attempt.

    Args:
        identity: digest of the inventory of all tensors of the checkpoint, as this rank sees it; see `Inventory`.
            0 where its part failed.
        problem: the reason why this rank failed, or None.
        written_bytes: bytes written by this rank, without headers.
        pieces: its pieces, in the form of `encode`.
    """

    iteration: int
    identity: int = 0
    groups: tuple[GroupDigest, ...] = ()
    problem: str | None = None
    written_bytes: int = 0
    pieces: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the serialized report."""
        has_failed = self.problem is not None
        head = _HEAD.pack(has_failed, self.iteration, self.identity, self.written_bytes, len(self.groups))
        rows = b"".join(_GROUP.pack(row.ranks, row.size, row.boxes, row.content) for row in self.groups)
        return head + rows + (self.pieces if self.problem is None else self.problem.encode())

    @staticmethod
    def from_bytes(data: bytes) -> RankReport:
        """Return the report in a message."""
        has_failed, iteration, identity, written_bytes, count = _HEAD.unpack_from(data)
        at = _HEAD.size + count * _GROUP.size
        groups = tuple(GroupDigest(*row) for row in _GROUP.iter_unpack(data[_HEAD.size : at]))
        problem = data[at:].decode() if has_failed else None
        return RankReport(iteration, identity, groups, problem, written_bytes, b"" if has_failed else data[at:])


def encode(pieces: Sequence[WrittenPiece], layout: Layout) -> bytes:
    """Return per piece the tensor's number in the layout, dimensions, byte range, digests, box."""
    numbers = {name: number for number, name in enumerate(layout.places)}
    parts = []
    for piece in pieces:
        dims = len(piece.box.offset)
        count = len(piece.digests) // DIGEST_BYTES
        parts.append(_PIECE.pack(numbers[piece.name], dims, piece.lo, piece.hi, count))
        parts.append(struct.pack(f"<{2 * dims}Q", *piece.box.offset, *piece.box.shape))
        parts.append(piece.digests)
    return b"".join(parts)


def decode(data: bytes, layout: Layout) -> list[WrittenPiece]:
    """Return the pieces given to `encode`, for the same layout."""
    names = list(layout.places)
    pieces, at = [], 0
    while at < len(data):
        number, dims, lo, hi, count = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        numbers = struct.unpack_from(f"<{2 * dims}Q", data, at)
        at += 16 * dims
        digests = data[at : at + count * DIGEST_BYTES]
        at += count * DIGEST_BYTES
        pieces.append(WrittenPiece(names[number], Box(numbers[:dims], numbers[dims:]), lo, hi, digests))
    return pieces
