"""Megatron's data files: a flat token array in `PREFIX.bin`, its dtype and the documents in `PREFIX.idx`.

datatrove's `MegatronDocumentTokenizer` writes them too. `trainer.data.document_index` has the index's format.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.data_file import DataFile, TokenArray, fitting_chunks, new_file, wrong_size
from trainer.data.document_index import DTYPES, HEADER, MAGIC, VERSION, DocumentIndex
from trainer.data.sources import find_files
from trainer.data.token_file import TokenFile

_MOST_TOKEN = 2**31 - 1  # int32's maximum


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
    index, file = DocumentIndex(path.with_suffix(".idx")), DataFile(path)
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
    code = {stored: code for code, stored in DTYPES.items()}[dtype]
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
        file.write(HEADER.pack(MAGIC, VERSION, code, len(ends), len(borders)))
        for array in (lengths, offsets, np.arange(len(borders), dtype="<i8")):
            file.write(array.tobytes())
