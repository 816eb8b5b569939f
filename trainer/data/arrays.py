"""Reads token arrays: little-endian files without a header, such as nanoGPT's `train.bin`.

A run does not read them directly: without a header their dtype is unknown, and truncation goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from reprise.errors import DataError, count_of
from trainer.data.data_file import DataFile
from trainer.data.encoding import Encoded
from trainer.data.sources import TextSource
from trainer.data.token_file import MAGICS, TokenFile

DTYPES = ("uint16", "uint32")
_NUMPY_MAGIC = b"\x93NUMPY"
_BLOCK_TOKENS = 64 << 10


def read_arrays(sources: Iterable[TextSource], dtype: str) -> Iterator[Encoded]:
    """Yield the arrays' tokens in order.

    Raises:
        DataError: A file cannot be read, has a known format's header, or has changed.
    """
    for source in sources:
        file, head = DataFile(source.path), np.zeros(8, np.uint8)
        file.fill(head, 0)
        tokens = TokenFile(file, np.dtype(dtype), file.size // np.dtype(dtype).itemsize, first_byte=0)
        has_header = head.tobytes().startswith((_NUMPY_MAGIC, *MAGICS))
        if has_header or not tokens.count or tokens.nbytes != file.size:
            raise DataError(
                "The file is not a token array",
                where=source.path,
                expected=f"{tokens.dtype.itemsize} bytes per token from the first byte, and at least one token",
                found="the header of a NumPy file or a token file" if has_header else count_of(file.size, "byte"),
                fix="Convert a NumPy file with numpy.load(PATH).tofile(OTHER). Train on a token file with "
                "data=token_file.",
            )
        for start in range(0, tokens.count, _BLOCK_TOKENS):
            block = tokens.read(start, min(start + _BLOCK_TOKENS, tokens.count))
            yield Encoded(block, 0, block.nbytes)
        source.check_unchanged()
