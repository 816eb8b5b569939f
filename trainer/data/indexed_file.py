"""Megatron's data files: tokens in `PREFIX.bin`, their dtype and the lengths of the documents in `PREFIX.idx`.

The format is that of Megatron-Core (``megatron/core/datasets/indexed_dataset.py``). `.bin` is a flat array of tokens.
`.idx` is, all little-endian: the magic, version 1 as uint64, the code of the dtype as uint8, the numbers of sequences
and of document borders as uint64; then the length of each sequence in tokens as int32, its offset in `.bin` in bytes as
int64, and the borders, as numbers of sequences, as int64. Multimodal files add an int8 for each sequence.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError
from reprise.files import FileCalls, atomic_output, is_file, open_regular
from trainer.data.document_index import READ_DOCUMENTS, DocumentIndex, damaged, unreadable
from trainer.data.sources import find_files
from trainer.data.token_file import TokenArray, TokenFile

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
# `DType` of indexed_dataset.py. Tokens are not negative, so int32 is read as uint32; a negative one is then outside
# every vocabulary.
_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<u4")}
_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_LENGTH_BYTES, _OFFSET_BYTES, _BORDER_BYTES, _MODE_BYTES = 4, 8, 8, 1
_MOST_TOKEN = 2**31 - 1  # of int32


class IndexedDocuments(DocumentIndex):
    """The documents of a `.bin` file, by its `.idx` file.

    Args:
        end: where, in bytes of `.bin`, the last sequence ends.
    """

    def __init__(
        self, path: Path, descriptor: int, dtype: np.dtype[Any], *, sequences: int, borders: int, end: int
    ) -> None:
        super().__init__(path, descriptor)
        self.dtype, self.end = dtype, end
        self._sequences, self._borders = sequences, borders
        self._offsets_at = _HEADER.size + sequences * _LENGTH_BYTES
        self._borders_at = self._offsets_at + sequences * _OFFSET_BYTES

    @property
    def count(self) -> int:
        """Return the number of documents; without borders every sequence is a document."""
        return self._borders - 1 if self._borders > 1 else self._sequences

    def borders(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the first positions of documents, and the end of the last; ascending, shape [stop - first + 1]."""
        last = self.count if stop is None else stop
        sequences = np.arange(first, last + 1)
        if self._borders > 1:
            sequences = self._array(self._borders_at + first * _BORDER_BYTES, last - first + 1)
            if int(sequences[0]) < 0 or int(sequences[-1]) > self._sequences or (sequences[1:] < sequences[:-1]).any():
                description = f"{int(sequences[0])} to {int(sequences[-1])}, or in another order"
                raise damaged(self.path, f"ascending borders of {self._sequences} sequences", description)
        offsets = self._offsets(sequences)
        bits = self.dtype.itemsize.bit_length() - 1  # a division would take longer than the read
        if (offsets[1:] < offsets[:-1]).any() or (offsets & self.dtype.itemsize - 1).any() or int(offsets[0]) < 0:
            raise damaged(self.path, "documents in ascending order", "another order")
        return offsets >> bits

    def _offsets(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where ascending sequences begin in `.bin`, in bytes. Memory is that of `READ_DOCUMENTS` at most."""
        offsets, begin = np.empty(sequences.size, np.int64), 0
        while begin < sequences.size:
            low = int(sequences[begin])
            end = int(np.searchsorted(sequences, low + READ_DOCUMENTS))
            high = int(sequences[end - 1])
            part = self._array(self._offsets_at + low * _OFFSET_BYTES, min(high + 1, self._sequences) - low)
            if high == self._sequences:
                part = np.append(part, self.end)
            offsets[begin:end] = part[sequences[begin:end] - low]
            begin = end
        return offsets

    def _begin(self, document: int) -> int:
        sequence = self._read(self._borders_at + document * _BORDER_BYTES) if self._borders > 1 else document
        if sequence == self._sequences:  # empty documents at the end
            return self.end // self.dtype.itemsize
        if not 0 <= sequence < self._sequences:
            raise damaged(self.path, f"a border of {self._sequences} sequences", f"{sequence}")
        offset = self._read(self._offsets_at + sequence * _OFFSET_BYTES)
        if not 0 <= offset <= self.end or offset % self.dtype.itemsize:
            raise damaged(self.path, f"an offset of a token in {self.end} bytes", f"{offset}")
        return offset // self.dtype.itemsize


def find_indexed(pattern: str) -> list[Path]:
    """Return the `.bin` files of a path, a glob, or a prefix as in Megatron's `--data-path`, sorted.

    Raises:
        DataError: there is none, or something else matches.
    """
    of_prefix = Path(f"{Path(pattern).expanduser()}.bin")
    if is_file(of_prefix):
        return [of_prefix]
    matches = find_files(pattern)
    unpaired = [path for path in matches if path.suffix != ".bin"]
    if unpaired:
        raise DataError(
            "a file of Megatron's data has another name",
            where=unpaired[0],
            expected="PREFIX.bin, beside PREFIX.idx",
            fix="Name the prefix, the file PREFIX.bin, or a glob such as 'folder/*.bin'.",
        )
    return matches


def open_indexed_file(path: Path) -> TokenFile:
    """Open a `.bin` file by the `.idx` file beside it. The index is checked at both of its ends, in constant time.

    Raises:
        DataError: a file cannot be read, has another format or dtype, or the two do not fit together.
    """
    place = path.with_suffix(".idx")
    index = _read_index(place)
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise unreadable(path, error) from error
    size = os.fstat(descriptor).st_size
    if size != index.end or size % index.dtype.itemsize:
        os.close(descriptor)
        raise DataError(
            "The size of a file of tokens differs from its index",
            where=path,
            expected=f"{index.end} bytes, by {place.name}",
            found=f"{size} bytes",
            fix="One of the two was cut off, or is of another data set: copy both again.",
        )
    return TokenFile(path, index.dtype, size // index.dtype.itemsize, descriptor, first_byte=0, documents=index)


def write_indexed_file(path: Path, chunks: Iterable[TokenArray], *, dtype: np.dtype[Any], end_of_text: int) -> None:
    """Write the chunks in order as `path`, a `.bin` file, and its index, each atomically.

    A sequence ends after each end-of-text token and at the end of the file. Each is a document.

    Raises:
        DataError: a token does not fit, or the file system fails.
        ValueError: for a dtype other than uint16 and uint32.
    """
    code = {stored: code for code, stored in _DTYPES.items()}.get(np.dtype(dtype).newbyteorder("<"))
    if code is None:
        raise ValueError(f"Megatron's files hold uint16 or int32 tokens, not {np.dtype(dtype)}")
    try:
        with atomic_output(path, FileCalls(), replaces=True) as partial, partial.open("xb") as file:
            lengths = _write_tokens(path, file, chunks, _DTYPES[code], end_of_text)
            file.flush()
            os.fsync(file.fileno())
        ends = np.cumsum(lengths, dtype=np.int64) * _DTYPES[code].itemsize
        offsets = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
        borders = np.arange(len(lengths) + 1, dtype="<i8")
        header = _HEADER.pack(MAGIC, _VERSION, code, len(lengths), len(borders))
        arrays = (np.asarray(lengths, "<i4"), np.asarray(offsets, "<i8"), borders)
        with atomic_output(path.with_suffix(".idx"), FileCalls(), replaces=True) as partial:
            FileCalls().write_whole(partial, header + b"".join(array.tobytes() for array in arrays))
    except OSError as error:
        raise DataError(
            "Megatron's data files cannot be written",
            where=path,
            found=error.strerror or str(error),
            fix="Check space and permissions, or name another folder.",
        ) from error


def _write_tokens(
    path: Path, file: BinaryIO, chunks: Iterable[TokenArray], dtype: np.dtype[Any], end_of_text: int
) -> Sequence[int]:
    """Write the tokens, and return the length of each sequence."""
    limit = min(int(np.iinfo(dtype).max), _MOST_TOKEN)
    lengths, waiting = list[int](), 0
    for chunk in chunks:
        if not chunk.size:
            continue
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high > limit:
            raise DataError("a token does not fit its file", where=path, expected=f"0 to {limit}", found=(low, high))
        file.write(np.ascontiguousarray(chunk, dtype).data)
        ends = np.flatnonzero(chunk == end_of_text) + 1
        if ends.size:
            lengths += np.diff(ends, prepend=-waiting).tolist()
            waiting = chunk.size - int(ends[-1])
        else:
            waiting += chunk.size
    return [*lengths, waiting] if waiting else lengths


def _read_index(place: Path) -> IndexedDocuments:
    try:
        descriptor = open_regular(place)
    except OSError as error:
        raise unreadable(place, error) from error
    try:
        size = os.fstat(descriptor).st_size
        dtype, sequences, borders = _check_header(place, os.pread(descriptor, _HEADER.size, 0), size)
        if not sequences:
            return IndexedDocuments(place, descriptor, dtype, sequences=0, borders=0, end=0)
        lengths = _HEADER.size
        offsets = lengths + sequences * _LENGTH_BYTES
        limits = offsets + sequences * _OFFSET_BYTES
        (first_offset,) = struct.unpack("<q", os.pread(descriptor, _OFFSET_BYTES, offsets))
        (last_length,) = struct.unpack("<i", os.pread(descriptor, _LENGTH_BYTES, offsets - _LENGTH_BYTES))
        (last_offset,) = struct.unpack("<q", os.pread(descriptor, _OFFSET_BYTES, limits - _OFFSET_BYTES))
        last_border = 0
        if borders:
            (last_border,) = struct.unpack(
                "<q", os.pread(descriptor, _BORDER_BYTES, limits + (borders - 1) * _BORDER_BYTES)
            )
    except OSError as error:
        os.close(descriptor)
        raise unreadable(place, error) from error
    except DataError:
        os.close(descriptor)
        raise
    end = last_offset + last_length * dtype.itemsize
    index = IndexedDocuments(place, descriptor, dtype, sequences=sequences, borders=borders, end=end)
    if first_offset != 0 or last_length < 0 or last_offset < 0 or last_border not in (0, sequences):
        description = (
            f"byte {first_offset}, the last of {last_length} tokens at byte {last_offset}, border {last_border}"
        )
        raise damaged(place, f"{sequences} sequences that begin at byte 0", description)
    return index


def _check_header(place: Path, header: bytes, size: int) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype, and the numbers of sequences and of borders.

    Raises:
        DataError: for another format, version or dtype, or a file of another size.
    """
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise DataError(
            "A file is no index of Megatron's data",
            where=place,
            expected=f"the magic {MAGIC.rstrip(bytes(1)).decode()}",
            found=f"{size} bytes that begin with {header[:9]!r}",
            fix="Name files of Megatron's tools/preprocess_data.py; older ones, without this magic, are not read.",
        )
    _, version, code, sequences, borders = _HEADER.unpack(header)
    if version != _VERSION or code not in _DTYPES:
        raise DataError(
            "An index of Megatron's data has another version or dtype",
            where=place,
            expected=f"version {_VERSION}, and uint16 (8) or int32 (4)",
            found=f"version {version}, and {_NAMES.get(code, 'an unknown one')} ({code})",
        )
    expected = _HEADER.size + sequences * (_LENGTH_BYTES + _OFFSET_BYTES) + borders * _BORDER_BYTES
    if size not in (expected, expected + sequences * _MODE_BYTES):
        raise DataError(
            "The size of an index differs from its header",
            where=place,
            expected=f"{expected} bytes for {sequences} sequences and {borders} borders of documents",
            found=f"{size} bytes",
            fix="It was cut off or appended to: copy it again.",
        )
    return _DTYPES[code], sequences, borders
