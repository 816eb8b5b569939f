"""Token files: a 1024-byte header and a flat token array.

The format is llm.c's (``dev/data/data_common.py``, ``write_datafile``): 256 little-endian int32 values ``[magic,
version, n_tokens, 0, ...]``, then the tokens.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError, count_of
from trainer.data.data_file import DataFile, TokenArray, fitting_chunks, new_file, wrong_size
from trainer.data.document_index import DocumentIndex

HEADER_BYTES = 256 * 4
# The header stores the count as int32.
MAX_TOKENS = 2**31 - 1
_CHUNK_TOKENS = 4 * 2**20
_OTHER_DESCRIPTORS = 1024  # descriptors for a rank's other files


# A token file's first two int32, and its dtype: llm.c, dev/data/data_common.py, HEADERS_INFO.
_FORMATS: dict[tuple[int, int], np.dtype[Any]] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}


class TokenFile:
    """A file with `count` tokens, uint16 or uint32.

    Args:
        first_byte: Offset of the first token.
        documents: The document starts, from a file beside it.
    """

    def __init__(
        self,
        file: DataFile,
        dtype: np.dtype[Any],
        count: int,
        *,
        first_byte: int = HEADER_BYTES,
        documents: DocumentIndex | None = None,
    ) -> None:
        self.path, self.dtype, self.count, self.documents = file.path, dtype, count, documents
        self._file, self._first_byte = file, first_byte

    @property
    def nbytes(self) -> int:
        """Return the token size in bytes, without the header."""
        return self.count * self.dtype.itemsize

    def status(self) -> os.stat_result:
        """Return the open file's status."""
        return self._file.status()

    def read(self, start: int = 0, stop: int | None = None) -> TokenArray:
        """Return a copy of tokens `start` to `stop` - 1, by default all, shape [stop - start].

        Raises:
            DataError: The file was truncated after it was opened, or cannot be read.
            IndexError: The file never had such tokens.
        """
        stop = self.count if stop is None else stop
        if not 0 <= start <= stop <= self.count:
            raise IndexError(f"expected tokens in range({self.count}), found {start} to {stop}")
        tokens = np.empty(stop - start, dtype=self.dtype)
        if self._file.fill(tokens, self._first_byte + start * self.dtype.itemsize):
            raise wrong_size(self.path, f"{self._first_byte + self.nbytes} bytes", self._file.size)
        return tokens

    def chunks(self) -> Iterator[TokenArray]:
        """Yield all tokens, in pieces of bounded size.

        Raises:
            DataError: The file was truncated after it was opened, or cannot be read.
        """
        for start in range(0, self.count, _CHUNK_TOKENS):
            yield self.read(start, min(start + _CHUNK_TOKENS, self.count))


def open_token_file(path: str | Path) -> TokenFile:
    """Open a token file and check its header and size.

    Raises:
        DataError: The file cannot be read, has another magic or version, or its size contradicts its header.
    """
    file, header = DataFile(Path(path)), np.zeros(HEADER_BYTES // 4, "<i4")
    missing = file.fill(header, 0)
    magic, version, count = header[:3].tolist()
    dtype = _FORMATS.get((magic, version))
    if missing or dtype is None:
        raise DataError(
            "A token file has an unknown header",
            where=path,
            expected=f"{HEADER_BYTES} bytes with magic and version {' or '.join(map(str, _FORMATS))}",
            found=f"{(magic, version)} in {file.size} bytes",
            fix="Write it again with this header of 256 int32 values. For token arrays without a header, use `reprise "
            "prepare-data --raw`; for Megatron files, data=megatron.",
        )
    if file.size != HEADER_BYTES + count * dtype.itemsize:
        raise wrong_size(file.path, f"{count} tokens of {dtype.itemsize} bytes", file.size)
    return TokenFile(file, dtype, count)


def open_token_array(path: Path, dtype: np.dtype[Any]) -> TokenFile:
    """Open a token array without a header, as in nanoGPT's files.

    Raises:
        DataError: The file cannot be read, is empty, has a header, or its size is not a multiple of the token size.
    """
    file, head = DataFile(path), np.zeros(2, "<i4")
    file.fill(head, 0)
    count, odd_bytes = divmod(file.size, dtype.itemsize)
    # Truncation in front of a token goes unnoticed.
    has_header = tuple(head.tolist()) in _FORMATS or head.tobytes().startswith(b"\x93NUMPY")
    if has_header or odd_bytes or not count:
        raise DataError(
            "The file is not a token array",
            where=path,
            expected=f"{dtype.itemsize} bytes per token from the first byte, and at least one token",
            found="the header of a NumPy file or a token file" if has_header else count_of(file.size, "byte"),
            fix="Convert a NumPy file with numpy.load(PATH).tofile(OTHER). Train on a token file with data=token_file.",
        )
    return TokenFile(file, dtype, count, first_byte=0)


def open_token_files(
    paths: Sequence[Path], open_file: Callable[[Path], TokenFile] = open_token_file
) -> list[TokenFile]:
    """Open all files in a data set, raising this process's soft limit on open files if necessary.

    Args:
        open_file: Opens a file in the set.

    Raises:
        DataError: See `open_file`; or the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < 2 * len(paths) + _OTHER_DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return [open_file(path) for path in paths]


def write_token_file(path: str | Path, chunks: Iterable[TokenArray], *, dtype: npt.DTypeLike) -> None:
    """Write chunks, in order, as a token file, atomically.

    Processes may race to write the same content. ``chunks`` are 1-D arrays with any integer dtype; memory holds a
    single chunk. ``dtype`` is uint16 or uint32.

    Raises:
        DataError: A token does not fit ``dtype``, there are more than 2**31 - 1 tokens, or the file system fails.
    """
    path, count, dtype = Path(path), 0, np.dtype(dtype).newbyteorder("<")
    magic = {stored: magic for magic, stored in _FORMATS.items()}[dtype]
    with new_file(path) as file:
        file.write(bytes(HEADER_BYTES))
        for chunk in fitting_chunks(path, chunks, dtype, largest=np.iinfo(dtype).max):
            count += chunk.size
            if count > MAX_TOKENS:
                raise DataError(
                    "A token file would hold too many tokens",
                    where=path,
                    expected=f"at most {MAX_TOKENS}",
                    found=f"at least {count}",
                    fix="Write several files: a data set can be a list of files.",
                )
            file.write(chunk.data)
        file.seek(0)
        file.write(np.array([*magic, count], "<i4").tobytes())
