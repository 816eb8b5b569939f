"""Megatron's data files: tokens in `PREFIX.bin`, their dtype and the document lengths in `PREFIX.idx`.

The format is Megatron-Core's (``megatron/core/datasets/indexed_dataset.py``). `.bin` is a flat token array. `.idx` is,
all little-endian: the magic, version 1 as uint64, the dtype code as uint8, the sequence count and the document border
count as uint64; then each sequence's length in tokens as int32, its byte offset in `.bin` as int64, and the borders, as
sequence numbers, as int64. Multimodal files, which add an int8 per sequence, are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.data_file import DataFile, Ints, TokenArray, fitting_chunks, new_file, wrong_size
from trainer.data.document_index import DocumentIndex, damaged
from trainer.data.sources import find_files
from trainer.data.token_file import TokenFile

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
# `DType` in indexed_dataset.py. Tokens are not negative, so int32 is read as uint32. A negative value is then outside
# every vocabulary.
_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<u4")}
_LENGTH_BYTES, _OFFSET_BYTES, _BORDER_BYTES = 4, 8, 8
_MOST_TOKEN = 2**31 - 1  # int32's maximum


class IndexedDocuments(DocumentIndex):
    """A `.bin` file's documents, from its `.idx` file, whose header and size are checked.

    ``end`` is the byte offset in `.bin` at which the last sequence ends.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        size, header = self.size, np.zeros(_HEADER.size, np.uint8)
        self.fill(header, 0)
        magic, version, code, self._sequences, borders = _HEADER.unpack(header.tobytes())
        if (magic, version) != (MAGIC, _VERSION) or code not in _DTYPES:
            actual = f"{magic!r}, version {version} and dtype code {code} in {size} bytes"
            raise damaged(path, f"{MAGIC!r}, version {_VERSION}, and uint16 (8) or int32 (4)", actual)
        self.dtype, self._has_borders = _DTYPES[code], borders > 1
        self._offsets_at = _HEADER.size + self._sequences * _LENGTH_BYTES
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
        """Return the documents' first positions and the last document's end, ascending, shape [stop - first + 1]."""
        sequences = np.arange(first, stop + 1)
        if self._has_borders:
            sequences = self._array(self._borders_at + first * _BORDER_BYTES, stop - first + 1)
            self._checked(sequences, self._sequences)
        low, high = int(sequences[0]), int(sequences[-1])
        starts = self._array(self._offsets_at + low * _OFFSET_BYTES, min(high + 1, self._sequences) - low)
        offsets = np.append(starts, self.end)[sequences - low]
        self._checked(offsets, self.end)
        bits = self.dtype.itemsize.bit_length() - 1  # a division would be slower than the read
        if (offsets & self.dtype.itemsize - 1).any():
            raise damaged(self.path, f"offsets that are multiples of {self.dtype.itemsize} bytes", "others")
        return offsets >> bits


def find_indexed(pattern: str) -> list[Path]:
    """Return the `.bin` files for a path or glob, which may lack the suffix as in Megatron's `--data-path`, sorted.

    Raises:
        DataError: Nothing matches.
    """
    return find_files(f"{pattern.removesuffix('.bin')}.bin")


def open_indexed_file(path: Path) -> TokenFile:
    """Open a `.bin` file by the `.idx` file beside it, in constant time.

    Raises:
        DataError: A file cannot be read or has another format or dtype, or the two do not match.
    """
    index, file = IndexedDocuments(path.with_suffix(".idx")), DataFile(path)
    if file.size != index.end or index.end % index.dtype.itemsize:
        raise wrong_size(path, f"{index.end} bytes", file.size)
    return TokenFile(file, index.dtype, index.end // index.dtype.itemsize, first_byte=0, documents=index)


def write_indexed_file(path: Path, chunks: Iterable[TokenArray], *, dtype: np.dtype[Any], end_of_text: int) -> None:
    """Write chunks, in order, as `path`, a `.bin` file, and its index, each atomically.

    A sequence ends after each end-of-text token and at the end. Each sequence is a document. `dtype` is uint16 or
    uint32.

    Raises:
        DataError: A token does not fit, or the file system fails.
    """
    dtype = np.dtype(dtype).newbyteorder("<")
    code = {stored: code for code, stored in _DTYPES.items()}[dtype]
    ends, size = list[int](), 0  # sequence ends, in tokens
    with new_file(path) as file:
        for chunk in fitting_chunks(path, chunks, dtype, largest=min(np.iinfo(dtype).max, _MOST_TOKEN)):
            file.write(chunk.data)
            ends += (np.flatnonzero(chunk == end_of_text) + size + 1).tolist()
            size += chunk.size
    if size > (ends[-1] if ends else 0):
        ends.append(size)
    borders = np.array([0, *ends], "<i8")
    lengths, offsets = np.diff(borders).astype("<i4"), borders[:-1] * dtype.itemsize
    with new_file(path.with_suffix(".idx")) as file:
        file.write(_HEADER.pack(MAGIC, _VERSION, code, len(ends), len(borders)))
        for array in (lengths, offsets, np.arange(len(borders), dtype="<i8")):
            file.write(array.tobytes())
