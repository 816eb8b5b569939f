"""A save's joint plan: which rank writes which bytes, agreed before the first byte is written.

A rank's table lists the pieces it writes. It changes only with the tensors, so most saves send its digest alone. Rank 0
checks once that all tables together tile every tensor. It works in columns, because millions of pieces are too many for
one object each. Later saves bring block digests in table order.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

from reprise.commit.messages import Groups, Message, ranks_text, sides_of
from reprise.errors import CheckpointError
from reprise.format.layout import Layout, Place
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES, Piece, TensorEntry, WrittenPiece

_LEVEL = 1  # zlib's level: a table's numbers are small, and most repeat the previous piece's
_DIGEST, _NUMBER = np.dtype("<u8"), np.dtype("<i8")
_LO, _HI, _BOX = 1, 2, 3  # table columns after the tensor number
_Integers = npt.NDArray[np.int64]


def encode(pieces: Sequence[Piece], layout: Layout) -> bytes:
    """Return the table for these pieces: the layout digest, then a row of numbers per piece.

    A row has the tensor's number in the layout, the byte range, and the box: offset and shape, each padded to the
    largest dimension count, as if all tensors had it.

    Raises:
        CheckpointError: A piece and its tensor differ in dimensions.
    """
    identity = xxhash.xxh3_64()
    for name, place in layout.places.items():  # row by row: one text for all would block other threads
        spec = place.spec
        identity.update(repr((spec.kind.value, name, spec.dtype.name, spec.shape, spec.view, place.file)).encode())
    numbers, most, rows = {name: number for number, name in enumerate(layout.places)}, _most_dims(layout), []
    for piece in pieces:
        offset, shape = piece.box.offset, piece.box.shape
        if len(offset) != len(layout.places[piece.name].spec.view):
            raise _not_tiled(piece.name)
        missing = most - len(offset)
        rows.append((numbers[piece.name], piece.lo, piece.hi, *offset, *(0,) * missing, *shape, *(1,) * missing))
    return identity.digest() + np.array(rows, dtype=_NUMBER).tobytes()


def _most_dims(layout: Layout) -> int:
    return max((len(place.spec.view) for place in layout.places.values()), default=0)


def _not_tiled(name: str) -> CheckpointError:
    return CheckpointError(
        "The ranks do not hold a tensor exactly once",
        where=name,
        fix="Nothing was committed. All ranks in its device mesh must take part, and hold equal or disjoint parts.",
    )


@dataclass(frozen=True, slots=True)
class JointPlan:
    """How the pieces in several tables tile a layout's tensors.

    Args:
        tables: The table digests, in rank order.
        counts: Each table's block count.
        entries: The manifest's tensors, with each block's number in table order in place of its digest.
        writers: By tensor, each piece's table number.
    """

    tables: tuple[int, ...]
    counts: tuple[int, ...]
    entries: Mapping[str, TensorEntry]
    writers: Mapping[str, _Integers]

    @staticmethod
    def of(layout: Layout, tables: Mapping[int, bytes]) -> JointPlan:
        """Check that the pieces in all tables, given by rank, tile the tensors.

        Raises:
            CheckpointError: Names the ranks with other tensors, or the first tensor with a missing, duplicate or
                unknown piece.
        """
        layouts = {rank: table[:DIGEST_BYTES] for rank, table in tables.items()}
        if len({*layouts.values()}) > 1:
            raise CheckpointError(
                "The ranks do not save the same tensors",
                expected="the same table of tensors on every rank",
                found=" against ".join(map(ranks_text, sides_of(layouts))),
                fix="Nothing was saved. Give all ranks the same model and optimizer: the stages of a pipeline, which "
                "differ by rank, cannot be saved like this. `save_state_dict` saves them.",
            )
        places, width = list(layout.places.values()), _BOX + 2 * _most_dims(layout)
        parts = [np.frombuffer(table, _NUMBER, offset=DIGEST_BYTES).reshape(-1, width) for table in tables.values()]
        rows = np.concatenate(parts)
        blocks = -(-(rows[:, _HI] - rows[:, _LO]) // BLOCK_BYTES)
        first_blocks, owners = np.cumsum(blocks) - blocks, np.repeat(np.arange(len(parts)), list(map(len, parts)))
        counts = np.bincount(owners, weights=blocks, minlength=len(parts)).astype(np.int64)
        order = np.argsort(rows[:, 0], kind="stable")
        bounds = np.searchsorted(rows[order, 0], np.arange(len(places) + 1))
        entries, writers = {}, {}
        for place, (lo, hi) in zip(places, itertools.pairwise(bounds), strict=True):
            name, members = place.spec.name, order[lo:hi]
            entries[name], in_order = _entry(place, rows[members], blocks[members], first_blocks[members])
            writers[name] = owners[members][in_order]
        return JointPlan(tuple(map(_digest_of, tables.values())), tuple(counts.tolist()), entries, writers)

    def tensors(self, digests: Sequence[bytes]) -> dict[str, TensorEntry]:
        """Return all tensors' manifest entries.

        Args:
            digests: Each table's block digests, in table order.

        Raises:
            CheckpointError: A table's digest count differs from its block count.
        """
        for number, (count, data) in enumerate(zip(self.counts, digests, strict=True)):
            if len(data) != count * DIGEST_BYTES:
                raise CheckpointError(
                    "A written piece has not one digest for each of its blocks",
                    where=f"report {number}",
                    expected=f"{count * DIGEST_BYTES} B",
                    found=f"{len(data)} B",
                    fix="Nothing was committed; this is a defect of the program that wrote it.",
                )
        blocks = np.frombuffer(b"".join(digests), dtype=_DIGEST)
        return {
            name: replace(entry, digests=blocks[np.frombuffer(entry.digests, dtype=_DIGEST)].tobytes())
            for name, entry in self.entries.items()
        }


def _entry(place: Place, rows: _Integers, blocks: _Integers, first_blocks: _Integers) -> tuple[TensorEntry, _Integers]:
    """Return a tensor's entry, and its rows' numbers in the entry's order.

    Args:
        rows: Its pieces' rows, as written by `encode`. Blocks are counted over all tables.

    Raises:
        CheckpointError: The pieces do not tile it.
    """
    name, view = place.spec.name, place.spec.view
    cell, total = np.zeros(len(rows), dtype=np.int64), np.full(len(rows), place.spec.dtype.itemsize)
    cuts, has_overlaps = list[tuple[int, ...]](), False
    for dim, size in enumerate(view):
        begin, length = rows[:, _BOX + dim], rows[:, (_BOX + rows.shape[1]) // 2 + dim]
        marks = np.sort(np.concatenate([[0, size], begin, begin + length]))
        marks = marks[np.append(True, marks[1:] != marks[:-1])]  # `np.unique` would block other threads
        if marks[0] < 0 or marks[-1] > size or (length <= 0).any():  # a sum that overflows is negative
            raise _not_tiled(name)
        index = np.searchsorted(marks, begin)
        has_overlaps |= bool((marks[index + 1] != begin + length).any())
        cell, total = cell * (len(marks) - 1) + index, total * length
        cuts.append(tuple(marks.tolist()))
    order = np.lexsort((rows[:, _LO], cell))
    cell, lo, hi, total, blocks = cell[order], rows[order, _LO], rows[order, _HI], total[order], blocks[order]
    is_first = np.append(True, cell[1:] != cell[:-1])[: len(rows)]
    is_last = np.append(is_first[1:], True)[: len(rows)]
    has_gaps = (lo != np.where(is_first, 0, np.append(0, hi)[:-1])).any() or (hi[is_last] != total[is_last]).any()
    cells = math.prod(len(marks) - 1 for marks in cuts)  # none without elements
    if has_overlaps or has_gaps or (lo >= hi).any() or int(is_first.sum()) != cells:
        raise _not_tiled(name)
    shares = defaultdict[int, list[int]](list)
    for number, offset in zip(cell[~is_first].tolist(), lo[~is_first].tolist(), strict=True):
        shares[number].append(offset)
    offsets = {number: tuple(in_cell) for number, in_cell in shares.items()}
    numbers = np.repeat(first_blocks[order] - (np.cumsum(blocks) - blocks), blocks) + np.arange(blocks.sum())
    return TensorEntry(view, tuple(cuts), offsets, numbers.astype(_DIGEST).tobytes()), order


def tile(layout: Layout, pieces: Sequence[WrittenPiece]) -> dict[str, TensorEntry]:
    """Return the entries for a layout's tensors, given all written pieces.

    Raises:
        CheckpointError: See `JointPlan.of` and `JointPlan.tensors`.
    """
    plan = JointPlan.of(layout, {0: encode(pieces, layout)})
    return plan.tensors([b"".join(piece.digests for piece in pieces)])


def _digest_of(table: bytes) -> int:
    return xxhash.xxh3_64_intdigest(table)


class KnownPlans:
    """Plans from earlier saves: a rank keeps its own table's digest, rank 0 all ranks' tables.

    A sent table counts as delivered once rank 0 has opened the attempt. Otherwise the rank sends its table again.
    """

    def __init__(self) -> None:
        self._delivered: int | None = None  # the digest of this rank's table at rank 0
        self._tables: dict[int, bytes] = {}  # on rank 0, by rank: compressed, as received
        self._joint: JointPlan | None = None

    def offer(self, table: bytes, groups: Groups = ()) -> Message:
        """Return this rank's offer with its table's digest, and the table itself unless rank 0 has it."""
        digest = _digest_of(table)
        is_delivered, self._delivered = digest == self._delivered, None
        payload = b"" if is_delivered else zlib.compress(table, _LEVEL)
        return Message(number=digest, groups=groups, payload=payload)

    def delivered(self, offer: Message) -> None:
        """Note that rank 0 has this rank's offer with its table."""
        self._delivered = offer.number

    def joint(self, layout: Layout, offers: Mapping[int, Message]) -> JointPlan:
        """Return all ranks' joint plan. Rank 0 only.

        Args:
            offers: All ranks' offers, by rank.

        Raises:
            CheckpointError: if the ranks save different tensors, their pieces do not tile the tensors, or a table has
                not arrived.
        """
        self._tables |= {rank: offer.payload for rank, offer in offers.items() if offer.payload}
        if self._joint is None or self._joint.tables != tuple(offer.number for offer in offers.values()):
            self._joint = None  # frees its memory while building the next
            self._joint = JointPlan.of(layout, {rank: self._table(rank, offer) for rank, offer in offers.items()})
        return self._joint

    def _table(self, rank: int, offer: Message) -> bytes:
        """Return an offer's table, sent or remembered."""
        table = zlib.decompress(self._tables[rank]) if rank in self._tables else b""
        if _digest_of(table) != offer.number:
            raise CheckpointError(
                "The table of a rank's pieces has not arrived at rank 0",
                where=f"rank {rank}",
                expected=f"digest {offer.number:016x}",
                found=f"{_digest_of(table):016x}",
                fix="Nothing was written. The next save sends all tables again.",
            )
        return table
