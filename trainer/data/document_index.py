"""Megatron's `.idx` files, read from the open file by position, keeping nothing in memory.

The format is Megatron-Core's (``megatron/core/datasets/indexed_dataset.py``), all little-endian: the magic, version 1
as uint64, the dtype code as uint8, the sequence count and the document border count as uint64; then each sequence's
length in tokens as int32, its byte offset in `.bin` as int64, and the borders, as sequence numbers, as int64.
Multimodal files, which add an int8 per sequence, are refused.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from reprise.errors import DataError
from trainer.data.data_file import DataFile, Ints

READ_DOCUMENTS = 1 << 18  # documents read at once in a pass over an index
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
# `DType` in indexed_dataset.py. Tokens are not negative, so int32 is read as uint32. A negative value is then outside
# every vocabulary.
DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<u4")}
_LENGTH_BYTES, _OFFSET_BYTES, _BORDER_BYTES = 4, 8, 8


class DocumentIndex(DataFile):
    """An open index with `count` documents, whose header and size are checked.

    ``end`` is the byte offset in `.bin` at which the last sequence ends.

    Raises:
        DataError: It cannot be read, or has another format or dtype.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        size, header = self.size, np.zeros(HEADER.size, np.uint8)
        self.fill(header, 0)
        magic, version, code, self._sequences, borders = HEADER.unpack(header.tobytes())
        if (magic, version) != (MAGIC, VERSION) or code not in DTYPES:
            actual = f"{magic!r}, version {version} and dtype code {code} in {size} bytes"
            raise damaged(path, f"{MAGIC!r}, version {VERSION}, and uint16 (8) or int32 (4)", actual)
        self.dtype, self._has_borders = DTYPES[code], borders > 1
        self._offsets_at = HEADER.size + self._sequences * _LENGTH_BYTES
        self._borders_at = self._offsets_at + self._sequences * _OFFSET_BYTES
        end = self._borders_at + borders * _BORDER_BYTES
        if size != end:
            sizes = f"{end} bytes for {self._sequences} sequences and {borders} document offsets"
            raise damaged(path, sizes, f"{size} bytes")
        # Without borders, every sequence is a document.
        self.count, self.end = borders - 1 if self._has_borders else self._sequences, 0
        if self._sequences:
            last = int(self._array(self._borders_at - _OFFSET_BYTES, 1)[0])
            length = int(self._array(self._offsets_at - _LENGTH_BYTES, 1, "<i4")[0])
            self.end = last + length * self.dtype.itemsize

    def borders(self, first: int, stop: int) -> Ints:
        """Return the first positions of documents `first` to `stop` - 1, and the last document's end.

        Returns:
            Ascending, shape [stop - first + 1].

        Raises:
            DataError: The index cannot be read, or is damaged there.
        """
        sequences = np.arange(first, stop + 1)
        if self._has_borders:
            sequences = self._array(self._borders_at + first * _BORDER_BYTES, stop - first + 1)
            self._check(sequences, self._sequences)
        low, high = int(sequences[0]), int(sequences[-1])
        starts = self._array(self._offsets_at + low * _OFFSET_BYTES, min(high + 1, self._sequences) - low)
        offsets = np.append(starts, self.end)[sequences - low]
        self._check(offsets, self.end)
        bits = self.dtype.itemsize.bit_length() - 1  # a division would be slower than the read
        if (offsets & self.dtype.itemsize - 1).any():
            raise damaged(self.path, f"offsets that are multiples of {self.dtype.itemsize} bytes", "others")
        return offsets >> bits

    def _array(self, at: int, count: int, dtype: str = "<i8") -> Ints:
        """Return `count` numbers from a byte offset in the index on."""
        values = np.empty(count, dtype=dtype)
        if missing_bytes := self.fill(values, at):
            raise damaged(self.path, f"{values.nbytes} bytes", f"{missing_bytes} fewer")
        return values

    def _check(self, borders: Ints, end: int) -> None:
        """Refuse borders that do not ascend from at least 0 to at most `end`."""
        if int(borders[0]) < 0 or int(borders[-1]) > end or (borders[1:] < borders[:-1]).any():
            actual = f"{int(borders[0])} to {int(borders[-1])}, or not ascending"
            raise damaged(self.path, f"ascending document offsets, up to {end}", actual)


def damaged(place: Path, expected: str, actual: str) -> DataError:
    """Return the error for an index whose numbers cannot be right."""
    return DataError(
        "The document index is damaged, or has an unsupported format",
        where=place,
        expected=expected,
        found=actual,
        fix="Copy it again, or write both files again.",
    )
