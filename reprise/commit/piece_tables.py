"""The tables of pieces that travel with the reports of a save: each only when it has changed.

A table says which bytes a rank writes. It changes with the tensors, so its digest is enough for most saves. Rank 0
checks once that the tables of all ranks tile every tensor; later saves only bring the digests of the blocks in order.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from reprise.commit.tiles import entries_of
from reprise.errors import CheckpointError
from reprise.format import manifest
from reprise.format.layout import Layout
from reprise.format.manifest import DIGEST_BYTES, TensorEntry
from reprise.format.report import RankReport, block_count_of, decode, digest_of_table

_LEVEL = 1  # of zlib: the numbers of a table are small, and most repeat those of the piece before
_DIGEST = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class Tiling:
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
    def of(layout: Layout, tables: Sequence[bytes]) -> Tiling:
        """Check that the pieces of all tables tile the tensors.

        Raises:
            CheckpointError: if they do not.
        """
        digests = tuple(digest_of_table(table) for table in tables)
        if (entries := entries_of(layout, tables)) is not None:
            return Tiling(layout, digests, tuple(entries[1]), entries[0])
        pieces, counts, begin = [], [], 0
        for table in tables:
            count = block_count_of(table)
            pieces += decode(table, np.arange(begin, begin + count, dtype=_DIGEST).tobytes(), layout)
            counts.append(count)
            begin += count
        return Tiling(layout, digests, tuple(counts), manifest.tile(layout, pieces))

    def suits(self, layout: Layout, tables: Sequence[int]) -> bool:
        """Return whether this tiling is of the very same layout and tables."""
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


def _numbers_of(entry: TensorEntry) -> npt.NDArray[np.uint64]:
    return np.frombuffer(entry.digests, dtype=_DIGEST)


class PieceTables:
    """The tables sent with earlier saves: a rank has the digest of its own, rank 0 the tables of all ranks.

    A table sent with an attempt counts as delivered once the attempt is committed: rank 0 had all tables then. In any
    other case the rank sends its table again.
    """

    def __init__(self) -> None:
        self._delivered: int | None = None  # the digest of the table of this rank that rank 0 has
        self._sending: int | None = None
        self._tables: dict[int, bytes] = {}  # on rank 0, by rank: compressed, as they came
        self._tiling: Tiling | None = None

    def pack(self, report: RankReport, table: bytes) -> RankReport:
        """Return the report of this rank with the digest of its table, and the table unless rank 0 has it."""
        digest = digest_of_table(table)
        is_delivered = digest == self._delivered
        self._delivered, self._sending = None, digest
        return replace(report, pieces=digest, table=b"" if is_delivered else zlib.compress(table, _LEVEL))

    def ended(self, *, is_committed: bool) -> None:
        """Note whether the attempt of the last report is committed."""
        self._delivered = self._sending if is_committed else None

    def tiling(self, layout: Layout, reports: Mapping[int, RankReport]) -> Tiling:
        """Return how the pieces of all ranks tile the tensors. Rank 0 only.

        Args:
            reports: of ranks whose parts are written, by rank.

        Raises:
            CheckpointError: if they do not tile them, or a table has not arrived.
        """
        self._tables |= {rank: report.table for rank, report in reports.items() if report.table}
        digests = [report.pieces for report in reports.values()]
        if self._tiling is None or not self._tiling.suits(layout, digests):
            self._tiling = None  # its memory is free while the next is made
            self._tiling = Tiling.of(layout, [self._table(rank, report) for rank, report in reports.items()])
        return self._tiling

    def _table(self, rank: int, report: RankReport) -> bytes:
        """Return the table that a report stands for."""
        table = zlib.decompress(self._tables[rank]) if rank in self._tables else b""
        if digest_of_table(table) != report.pieces:
            raise CheckpointError(
                "The table of a rank's pieces has not arrived at rank 0",
                where=f"rank {rank}",
                expected=f"digest {report.pieces:016x}",
                found=f"{digest_of_table(table):016x}",
                fix="Nothing was committed. The next save sends all tables again.",
            )
        return table
