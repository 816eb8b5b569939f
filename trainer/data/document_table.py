"""Where documents and their samples start: a table with a count and a position per 512 documents.

To find a sample or document, a process searches the table and reads 513 borders from the open index. So it holds 16
bytes per 512 documents. It makes the table in a single pass over the index, in pieces of bounded size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from reprise.errors import DataError
from trainer.data.data_file import Ints
from trainer.data.document_index import READ_DOCUMENTS, DocumentIndex, damaged
from trainer.data.token_file import TokenFile

STRIDE = 512  # documents; READ_DOCUMENTS is a multiple


@dataclass(frozen=True, slots=True)
class DocumentTable:
    """The samples in a file's documents.

    Args:
        seq_length: Maximum inputs per sample. Samples overlap by a token.
        digest: 16 hex digits, xxh3_64 over all document borders as int64.
        counts: int64 [ceil(documents / STRIDE) + 1], the number of samples before each document whose number is a
            multiple of `STRIDE`, then the total.
        starts: int64 [the same], these documents' positions, then the last document's end.
    """

    documents: DocumentIndex
    seq_length: int
    digest: str
    counts: Ints
    starts: Ints

    @property
    def samples(self) -> int:
        """Return the sample count."""
        return int(self.counts[-1])

    def locate(self, sample: int) -> tuple[int, int]:
        """Return a sample's first token and its document's end.

        Args:
            sample: In range(self.samples).

        Raises:
            DataError: The index cannot be read, or has changed since the table was made.
        """
        block = int(self.counts.searchsorted(sample, side="right")) - 1
        borders = self._borders(block)
        bounds = self.counts[block] + np.append(0, np.cumsum(_sample_counts(borders, self.seq_length)))
        if bounds[-1] != self.counts[block + 1]:
            raise self._overwritten()
        number = int(bounds.searchsorted(sample, side="right")) - 1
        return int(borders[number] + (sample - bounds[number]) * self.seq_length), int(borders[number + 1])

    def starts_in(self, start: int, stop: int) -> Ints:
        """Return the positions in range(start, stop) at which a document starts, in ascending order.

        Raises:
            DataError: The index cannot be read, or has changed since the table was made.
        """
        first, end = np.searchsorted(self.starts, (start, stop)).tolist()
        blocks = range(max(0, first - 1), min(end, self.starts.size - 1))
        borders = np.concatenate([np.empty(0, np.int64), *(self._borders(block)[:-1] for block in blocks)])
        # An empty document starts where the next does. Empty documents at the end start nowhere.
        return np.unique(borders[(start <= borders) & (borders < min(stop, self.starts[-1]))])

    def _borders(self, block: int) -> Ints:
        """Return a block's document borders."""
        first = block * STRIDE
        borders = self.documents.borders(first, min(first + STRIDE, self.documents.count))
        if (borders[0], borders[-1]) != (self.starts[block], self.starts[block + 1]):
            raise self._overwritten()
        return borders

    def _overwritten(self) -> DataError:
        changed = "different documents: it was overwritten"
        return damaged(self.documents.path, "the documents read at the start", changed)


def _sample_counts(borders: Ints, seq_length: int) -> Ints:
    """Count each document's samples [..., n] from the borders [..., n + 1]."""
    counts: Ints = (np.maximum(np.diff(borders) - 1, 0) + seq_length - 1) // seq_length
    return counts


def table_of(file: TokenFile, seq_length: int) -> DocumentTable:
    """Read a file's index once, and return its table.

    Args:
        seq_length: Maximum inputs per sample. Samples overlap by a token.

    Raises:
        DataError: The index cannot be read, or is damaged.
    """
    documents = file.documents
    assert documents is not None, "only files with an index are cut by document"
    hasher, total, count = xxhash.xxh3_64(), 0, documents.count
    counts, starts = [np.zeros(1, np.int64)], list[Ints]()
    for first in range(0, max(count, 1), READ_DOCUMENTS):
        stop = min(first + READ_DOCUMENTS, count)
        borders = documents.borders(first, stop)
        hasher.update((borders if stop == count else borders[:-1]).data)
        starts.append(borders[: stop - first : STRIDE])
        if stop > first:
            sums = np.add.reduceat(_sample_counts(borders, seq_length), np.arange(0, stop - first, STRIDE))
            counts.append(total + np.cumsum(sums))
            total = int(counts[-1][-1])
    starts.append(borders[-1:])
    return DocumentTable(documents, seq_length, hasher.hexdigest(), np.concatenate(counts), np.concatenate(starts))
