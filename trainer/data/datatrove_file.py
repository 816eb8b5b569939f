"""datatrove's files: tokens in `PATH`, the ends of documents in `PATH.index`, a description in `PATH.metadata`.

The format is that of datatrove (``datatrove/pipeline/tokens/tokenizer.py``, ``TokenizedFile``). `PATH`, in `.ds` by
its writer, is a flat array of uint16, or of uint32 for vocabularies above 65536. `.index` has the end of each document
in tokens, as uint64. The first line of `.metadata`, which may be absent, ends with the bytes of a token. `.loss`, which
`save_loss_metadata` writes, has a byte for each token.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError
from reprise.files import lexists, open_regular, read_regular
from trainer.data.document_index import DocumentIndex, damaged, unreadable
from trainer.data.token_file import TokenFile

_END_BYTES = 8
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_METADATA_BYTES = 64 * 1024  # its first line is the path of a tokenizer


class DatatroveDocuments(DocumentIndex):
    """The documents of a file of datatrove, by its index."""

    def __init__(self, path: Path, descriptor: int) -> None:
        super().__init__(path, descriptor)
        size = os.fstat(descriptor).st_size
        if size % _END_BYTES:
            raise damaged(path, f"{_END_BYTES} bytes for each document", f"{size} bytes")
        self._count = size // _END_BYTES
        self.end = self._read(size - _END_BYTES) if self._count else 0

    @property
    def count(self) -> int:
        """Return the number of documents."""
        return self._count

    def borders(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the first positions of documents, and the end of the last; ascending, shape [stop - first + 1]."""
        last = self._count if stop is None else stop
        if first:
            borders = self._array((first - 1) * _END_BYTES, last - first + 1)
        else:
            borders = np.append(np.zeros(1, np.int64), self._array(0, last))
        if (np.diff(borders) < 0).any():
            raise damaged(self.path, "documents in ascending order", "another order")
        return borders

    def _begin(self, document: int) -> int:
        begin = self._read((document - 1) * _END_BYTES) if document else 0
        if not 0 <= begin <= self.end:
            raise damaged(self.path, f"an end within {self.end} tokens", f"{begin}")
        return begin


def open_datatrove_file(path: Path) -> TokenFile:
    """Open a file of tokens by the index beside it, whose last end must be that of the tokens. Takes constant time.

    Raises:
        DataError: a file cannot be read, the tokens do not fit their index or their description, or have loss masks.
    """
    index = _open_index(path)
    if lexists(Path(f"{path}.loss")):
        raise DataError(
            "Loss masks lie beside a file of tokens, and would be ignored",
            where=f"{path}.loss",
            fix="Move them away to train on every token, or write the tokens without save_loss_metadata.",
        )
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        size = os.fstat(descriptor).st_size
        token_bytes = _token_bytes(path, size, index)
    except DataError:
        os.close(descriptor)
        raise
    return TokenFile(path, _DTYPES[token_bytes], size // token_bytes, descriptor, first_byte=0, documents=index)


def _open_index(path: Path) -> DatatroveDocuments:
    place = Path(f"{path}.index")
    try:
        return DatatroveDocuments(place, open_regular(place))
    except FileNotFoundError as error:
        raise DataError(
            "A file of tokens has no index beside it",
            where=path,
            expected=place.name,
            fix="Name files that datatrove's DocumentTokenizer has completed, as 'folder/*.ds': it writes the index of "
            "a file at its end.",
        ) from error
    except OSError as error:
        raise unreadable(place, error) from error


def _token_bytes(path: Path, size: int, index: DatatroveDocuments) -> int:
    """Return the bytes of a token: those with which size and index agree, and the description where there is one."""
    stated = _stated_bytes(Path(f"{path}.metadata"))
    for token_bytes in _DTYPES if stated is None else (stated,):
        if index.end >= 0 and size == index.end * token_bytes:
            return token_bytes
    sizes = "2 or 4" if stated is None else stated
    raise DataError(
        "The size of a file of tokens differs from its index",
        where=path,
        expected=f"{index.end} tokens of {sizes} bytes, by {index.path.name}",
        found=f"{size} bytes",
        fix="The file was cut off, is still being written, or is of another data set: copy both, or write both again.",
    )


def _stated_bytes(place: Path) -> int | None:
    """Return the bytes of a token by the description of the file; None without one."""
    try:
        description = read_regular(place, limit_bytes=_METADATA_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(place, error) from error
    stated = description.partition(b"\n")[0].rpartition(b"|")[2]
    if stated not in (b"2", b"4"):
        raise DataError(
            "The description of a file of tokens is damaged",
            where=place,
            expected="a first line that ends with |2 or |4, the bytes of a token",
            found=repr(stated[:32]),
            fix="Copy it again, or move it away: the sizes of the other two files then decide.",
        )
    return int(stated)
