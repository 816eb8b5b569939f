"""datatrove's files: tokens in `PATH`, document ends in `PATH.index`, a description in `PATH.metadata`.

The format is datatrove's (``datatrove/pipeline/tokens/tokenizer.py``, ``TokenizedFile``). `PATH`, which its writer
names `.ds`, is a flat array, uint16, or uint32 for vocabularies above 65536. `.index` has each document's end in
tokens, as uint64. The first line in `.metadata`, which may be absent, ends with the bytes per token. `.loss`, written
for `save_loss_metadata`, has a byte per token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError
from reprise.storage import lexists, read_regular
from trainer.data.data_file import DataFile, unreadable
from trainer.data.document_index import DocumentIndex, damaged, other_size
from trainer.data.token_file import TokenFile

_END_BYTES = 8
_METADATA_BYTES = 64 * 1024  # its first line is the path of a tokenizer


class DatatroveDocuments(DocumentIndex):
    """A datatrove file's documents, from its index."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.count, odd_bytes = divmod(self.size, _END_BYTES)
        if odd_bytes:
            raise damaged(path, f"{_END_BYTES} bytes for each document", f"{self.size} bytes")
        self.end = int(self._array(self.size - _END_BYTES, 1)[0]) if self.count else 0

    def borders(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the documents' first positions and the last document's end, ascending, shape [stop - first + 1]."""
        stop, start = self.count if stop is None else stop, max(0, first - 1)
        borders = self._array(start * _END_BYTES, stop - start)
        if not first:
            borders = np.append(np.zeros(1, np.int64), borders)
        return self._checked(borders, self.end)


def open_datatrove_file(path: Path) -> TokenFile:
    """Open a token file by the index beside it, whose last end must match the token count. Takes constant time.

    Raises:
        DataError: A file cannot be read, the tokens do not match their index or description, or there are loss masks.
    """
    place, masks = Path(f"{path}.index"), Path(f"{path}.loss")
    if not lexists(place):
        raise DataError(
            "A token file has no index beside it",
            where=path,
            expected=place.name,
            fix="Pass files that datatrove's DocumentTokenizer has finished writing, such as 'folder/*.ds'.",
        )
    if lexists(masks):
        raise DataError(
            "A token file has loss masks beside it, which would be ignored",
            where=masks,
            fix="Move them away to train on every token, or write the tokens without save_loss_metadata.",
        )
    index, file, stated = DatatroveDocuments(place), DataFile(path), _stated_bytes(Path(f"{path}.metadata"))
    for token_bytes in stated:
        if index.end >= 0 and file.size == index.end * token_bytes:
            return TokenFile(file, np.dtype(f"<u{token_bytes}"), index.end, first_byte=0, documents=index)
    sizes = " or ".join(map(str, stated))
    raise other_size(path, place, f"{index.end} tokens of {sizes} bytes", file.size)


def _stated_bytes(place: Path) -> tuple[int, ...]:
    """Return the bytes per token from the file's description. Without a description, return both possible sizes."""
    try:
        description = read_regular(place, limit_bytes=_METADATA_BYTES)
    except FileNotFoundError:
        return 2, 4
    except OSError as error:
        raise unreadable(place, error) from error
    stated = description.partition(b"\n")[0].rpartition(b"|")[2]
    if stated not in (b"2", b"4"):
        raise damaged(place, "a first line that ends with |2 or |4, the bytes of a token", repr(stated[:32]))
    return (int(stated),)
