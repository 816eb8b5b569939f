"""The joint plan of a save: which rank writes which bytes, agreed before the first of them is written.

The table of a rank lists the pieces that it writes. It changes with the tensors, so its digest is enough for most
saves. Rank 0 checks once that the tables of all ranks tile every tensor. Later saves bring the digests of the blocks
in the order of the tables.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from reprise.commit.report import Offer
from reprise.commit.tiles import PIECE, entries_of
from reprise.errors import CheckpointError
from reprise.format.box import Box
from reprise.format.layout import Layout
from reprise.format.manifest import DIGEST_BYTES, TensorEntry, WrittenPiece, block_count

_LEVEL = 1  # of zlib: the numbers of a table are small, and most repeat those of the piece before
_DIGEST = np.dtype("<u8")


class PlannedPiece(Protocol):
    """Bytes `[lo, hi)` of the packed image of a box, written by one rank."""

    @property
    def name(self) -> str: ...
    @property
    def box(self) -> Box: ...
    @property
    def lo(self) -> int: ...
    @property
    def hi(self) -> int: ...


def encode(pieces: Sequence[PlannedPiece], layout: Layout) -> bytes:
    """Return the table of pieces: the tensor's number in the layout, dimensions, byte range, count of blocks, box."""
    numbers = {name: number for number, name in enumerate(layout.places)}
    parts = []
    for piece in pieces:
        dims = len(piece.box.offset)
        parts.append(PIECE.pack(numbers[piece.name], dims, piece.lo, piece.hi, block_count(piece.hi - piece.lo)))
        parts.append(struct.pack(f"<{2 * dims}Q", *piece.box.offset, *piece.box.shape))
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class JointPlan:
    """How the pieces of several tables tile the tensors of a layout.

    Args:
        tables: the digests of the tables, in the order of the ranks.
        counts: the number of blocks of each table.
        entries: the tensors of the manifest; in the place of the digest of each block stands the number of the block
            in the order of the tables.
    """

    layout: Layout
    tables: tuple[int, ...]
    counts: tuple[int, ...]
    entries: Mapping[str, TensorEntry]

    @staticmethod
    def of(layout: Layout, tables: Sequence[bytes]) -> JointPlan:
        """Check that the pieces of all tables tile the tensors.

        Raises:
            CheckpointError: naming the first tensor with a missing, duplicate or unknown piece.
        """
        entries, counts = entries_of(layout, tables)
        return JointPlan(layout, tuple(map(_digest_of, tables)), tuple(counts), entries)

    def suits(self, layout: Layout, tables: Sequence[int]) -> bool:
        """Return whether this plan is of the very same layout and tables."""
        return self.layout is layout and self.tables == tuple(tables)

    def tensors(self, digests: Sequence[bytes]) -> dict[str, TensorEntry]:
        """Return the entries of all tensors in the manifest.

        Args:
            digests: the digests of all blocks of each table, in the order of the tables.

        Raises:
            CheckpointError: if a table has not one digest for each of its blocks.
        """
        blocks, begin = np.empty(sum(self.counts), dtype=_DIGEST), 0
        for number, (count, data) in enumerate(zip(self.counts, digests, strict=True)):
            if len(data) != count * DIGEST_BYTES:
                raise CheckpointError(
                    "A written piece has not one digest for each of its blocks",
                    where=f"report {number}",
                    expected=f"{count * DIGEST_BYTES} B",
                    found=f"{len(data)} B",
                    fix="Nothing was committed; this is a defect of the program that wrote it.",
                )
            blocks[begin : begin + count] = np.frombuffer(data, dtype=_DIGEST)
            begin += count
        return {
            name: replace(entry, digests=blocks[_numbers_of(entry)].tobytes()) for name, entry in self.entries.items()
        }

    def writers(self, itemsizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return by tensor the number of the table of each piece.

        Args:
            itemsizes: by tensor, the bytes of an element.
        """
        ends = np.cumsum(self.counts)
        writers = {}
        for name, entry in self.entries.items():
            first_blocks = [piece.digests[:DIGEST_BYTES] for piece in entry.pieces(itemsizes[name])]
            numbers = np.frombuffer(b"".join(first_blocks), dtype=_DIGEST)
            writers[name] = tuple(np.searchsorted(ends, numbers, side="right").tolist())
        return writers


def tile(layout: Layout, pieces: Sequence[WrittenPiece]) -> dict[str, TensorEntry]:
    """Return the entries of the tensors of a layout whose pieces are all written.

    Raises:
        CheckpointError: as `JointPlan.of` and `JointPlan.tensors`.
    """
    plan = JointPlan.of(layout, [encode(pieces, layout)])
    return plan.tensors([b"".join(piece.digests for piece in pieces)])


def _numbers_of(entry: TensorEntry) -> npt.NDArray[np.uint64]:
    return np.frombuffer(entry.digests, dtype=_DIGEST)


def _digest_of(table: bytes) -> int:
    return xxhash.xxh3_64_intdigest(table)


class KnownPlans:
    """The plans of earlier saves: a rank has the digest of its own table, rank 0 the tables of all ranks.

    A table that was sent counts as delivered once rank 0 has opened the attempt. In any other case the rank sends its
    table again.
    """

    def __init__(self) -> None:
        self._delivered: int | None = None  # the digest of the table of this rank that rank 0 has
        self._sending: int | None = None
        self._tables: dict[int, bytes] = {}  # on rank 0, by rank: compressed, as they came
        self._joint: JointPlan | None = None

    def with_table(self, offer: Offer, table: bytes) -> Offer:
        """Return the offer of this rank with the digest of its table, and the table unless rank 0 has it."""
        digest = _digest_of(table)
        is_delivered = digest == self._delivered
        self._delivered, self._sending = None, digest
        return replace(offer, pieces=digest, table=b"" if is_delivered else zlib.compress(table, _LEVEL))

    def delivered(self) -> None:
        """Note that rank 0 has the table of the last offer."""
        self._delivered = self._sending

    def joint(self, layout: Layout, offers: Mapping[int, Offer]) -> JointPlan:
        """Return the plan of all ranks. Rank 0 only.

        Args:
            offers: of all ranks, by rank.

        Raises:
            CheckpointError: if the pieces do not tile the tensors, or a table has not arrived.
        """
        self._tables |= {rank: offer.table for rank, offer in offers.items() if offer.table}
        digests = [offer.pieces for offer in offers.values()]
        if self._joint is None or not self._joint.suits(layout, digests):
            self._joint = None  # its memory is free while the next is made
            self._joint = JointPlan.of(layout, [self._table(rank, offer) for rank, offer in offers.items()])
        return self._joint

    def _table(self, rank: int, offer: Offer) -> bytes:
        """Return the table that an offer stands for."""
        table = zlib.decompress(self._tables[rank]) if rank in self._tables else b""
        if _digest_of(table) != offer.pieces:
            raise CheckpointError(
                "The table of a rank's pieces has not arrived at rank 0",
                where=f"rank {rank}",
                expected=f"digest {offer.pieces:016x}",
                found=f"{_digest_of(table):016x}",
                fix="Nothing was written. The next save sends all tables again.",
            )
        return table
