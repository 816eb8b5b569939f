"""datatrove's files: tokens in `PATH`, document ends in `PATH.index`.

The format is datatrove's (``datatrove/pipeline/tokens/tokenizer.py``, ``TokenizedFile``). `PATH`, which its writer
names `.ds`, is a flat array, uint16, or uint32 for vocabularies above 65536. `.index`, which is
written last, has each document's end in tokens, as uint64. `.loss`, written for `save_loss_metadata`, has a byte per
token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reprise.errors import DataError
from reprise.storage import lexists
from trainer.data.data_file import DataFile, Ints, wrong_size
from trainer.data.document_index import DocumentIndex, damaged
from trainer.data.token_file import TokenFile

_END_BYTES = 8


class DatatroveDocuments(DocumentIndex):
    """A datatrove file's documents, from its index."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.count, odd_bytes = divmod(self.size, _END_BYTES)
        if odd_bytes:
            raise damaged(path, f"{_END_BYTES} bytes for each document", f"{self.size} bytes")
        self.end = int(self._array(self.size - _END_BYTES, 1)[0]) if self.count else 0

    def borders(self, first: int, stop: int) -> Ints:
        """Return the documents' first positions and the last document's end, ascending, shape [stop - first + 1]."""
        start = max(0, first - 1)
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
    if lexists(masks):
        raise DataError(
            "A token file has loss masks beside it, which would be ignored",
            where=masks,
            fix="Move them away to train on every token, or write the tokens without save_loss_metadata.",
        )
    index, file = DatatroveDocuments(place), DataFile(path)
    for dtype in map(np.dtype, ("<u2", "<u4")):
        if index.end >= 0 and file.size == index.end * dtype.itemsize:
            return TokenFile(file, dtype, index.end, first_byte=0, documents=index)
    raise wrong_size(path, f"{index.end} tokens of 2 or 4 bytes", file.size)
