"""Where the samples of documents begin: the sample counts of each 512 documents, in a file of the cache.

A sample is found by a search in these counts and a read of 513 borders from the open index, so a process holds
8 bytes for each 512 documents. The process that finds no valid table makes one in a single pass over the index,
in pieces of bounded size. A table is valid like a digest file (`trainer.data.digest_file`): only for an index of the
same path, size and times of change. A malformed table is ignored and made again.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from reprise.storage import read_regular
from trainer.data.digest_file import check_unchanged, identity, in_cache, write_cached
from trainer.data.document_index import READ_DOCUMENTS, DocumentIndex, damaged
from trainer.data.token_file import TokenFile

Ints = npt.NDArray[np.int64]

STRIDE = 512  # documents; READ_DOCUMENTS is a multiple
_FOLDER = "documents"
# Version, size and times of the index; sample length, digest of the borders, longest document; then the counts.
_HEAD = re.compile(rb"reprise-documents 1 (\d+ -?\d+ -?\d+) (\d+) ([0-9a-f]{16}) (\d+) *\n")
_HEAD_BYTES = 256  # so that the counts are aligned
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class DocumentTable:
    """The samples of the documents of a file.

    Args:
        digest: 16 hex digits, xxh3_64 of the borders of all documents as int64.
        longest: tokens of the longest document.
        counts: int64 [ceil(documents / STRIDE) + 1], the samples of all documents before each document whose number
            is a multiple of `STRIDE`, and of all documents.
    """

    digest: str
    longest: int
    counts: Ints

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return int(self.counts[-1])

    def locate(self, documents: DocumentIndex, samples: Ints, seq_length: int) -> tuple[Ints, Ints]:
        """Return the first token of each sample and the end of its document, each int64 [n].

        Args:
            samples: int64 [n], of range(self.samples).

        Raises:
            DataError: the index cannot be read, or was changed since the table was made.
        """
        blocks = np.unique(np.searchsorted(self.counts, samples, side="right") - 1)
        borders = np.empty((blocks.size, STRIDE + 1), np.int64)
        for row, first in zip(borders, (blocks * STRIDE).tolist(), strict=True):
            part = documents.borders(first, min(first + STRIDE, documents.count))
            row[: part.size], row[part.size :] = part, part[-1]
        bounds = np.empty_like(borders)
        bounds[:, 0] = self.counts[blocks]
        bounds[:, 1:] = bounds[:, :1] + np.cumsum(_sample_counts(borders, seq_length), axis=1)
        if (bounds[:, -1] != self.counts[blocks + 1]).any():
            raise damaged(documents.path, "the documents of the start", "others: it was overwritten")
        # Both ascend over all blocks, and no sample begins at the last border of a block.
        positions, before = borders.ravel(), bounds.ravel()
        numbers = np.searchsorted(before, samples, side="right") - 1
        return positions[numbers] + (samples - before[numbers]) * seq_length, positions[numbers + 1]


def documents_of(file: TokenFile) -> DocumentIndex:
    """Return the documents of a file that has an index."""
    assert file.documents is not None, "only files with an index are cut by document"
    return file.documents


def table_of(
    documents: DocumentIndex, *, seq_length: int, cache: Path | None, read_again: bool = False
) -> DocumentTable:
    """Return the table of an index, from the cache if it is valid, otherwise from the index, and cache it.

    Args:
        seq_length: the most inputs of a sample; samples overlap by a token.
        cache: the folder of prepared data; None caches nothing.
        read_again: ignore the cache.

    Raises:
        DataError: the index cannot be read, is damaged, or was written to meanwhile.
    """
    before = documents.status()
    place = None if cache is None else in_cache(documents.path, before, cache / _FOLDER, f".{seq_length}")
    size = -(-documents.count // STRIDE) + 1
    if place is not None and not read_again:
        table = _read(place, identity(before), seq_length, size)
        if table is not None:
            return table
    table, after = _pass(documents, seq_length, size), documents.status()
    check_unchanged(documents.path, before, after)
    if place is not None:
        # Without a right to write, every process makes the table.
        with contextlib.suppress(OSError):
            write_cached(place, _encode(table, identity(before), seq_length), changed_ns=after.st_ctime_ns)
    return table


def _sample_counts(borders: Ints, seq_length: int) -> Ints:
    """Return the number of samples of each document [..., n] between its borders [..., n + 1]."""
    counts: Ints = (np.maximum(np.diff(borders) - 1, 0) + seq_length - 1) // seq_length
    return counts


def _pass(documents: DocumentIndex, seq_length: int, size: int) -> DocumentTable:
    """Return the table by a pass over the index."""
    hasher, longest, total = xxhash.xxh3_64(), 0, 0
    counts, count = np.zeros(size, np.int64), documents.count
    for first in range(0, max(count, 1), READ_DOCUMENTS):
        stop = min(first + READ_DOCUMENTS, count)
        borders = documents.borders(first, stop)
        hasher.update((borders if stop == count else borders[:-1]).data)
        if stop > first:
            longest = max(longest, int(np.diff(borders).max()))
            sums = np.add.reduceat(_sample_counts(borders, seq_length), np.arange(0, stop - first, STRIDE))
            block = first // STRIDE + 1
            counts[block : block + sums.size] = total + np.cumsum(sums)
            total = int(counts[block + sums.size - 1])
    return DocumentTable(hasher.hexdigest(), longest, counts)


def _encode(table: DocumentTable, state: str, seq_length: int) -> bytes:
    head = f"reprise-documents 1 {state} {seq_length} {table.digest} {table.longest}"
    data = head.ljust(_HEAD_BYTES - 1).encode("ascii") + b"\n" + table.counts.astype("<i8").tobytes()
    return data + xxhash.xxh3_64_digest(data)


def _read(place: Path, state: str, seq_length: int, size: int) -> DocumentTable | None:
    """Return the cached table with `size` counts of an index in this state, or None."""
    try:
        data = read_regular(place, limit_bytes=_HEAD_BYTES + 8 * size + _DIGEST_BYTES, follows_links=False)
    except OSError:
        return None
    body, head = memoryview(data)[:-_DIGEST_BYTES], _HEAD.match(data)
    if head is None or len(body) != _HEAD_BYTES + 8 * size or xxhash.xxh3_64_digest(body) != data[-_DIGEST_BYTES:]:
        return None
    if head.end() != _HEAD_BYTES or (head[1].decode(), int(head[2])) != (state, seq_length):
        return None
    return DocumentTable(head[3].decode(), int(head[4]), np.frombuffer(body[_HEAD_BYTES:], "<i8"))
