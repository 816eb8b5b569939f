"""Makes token files of token arrays without a header, such as nanoGPT's `train.bin`.

Such an array is not read directly: without a header its dtype is unknown, and truncation goes unnoticed.
"""

from __future__ import annotations

import functools
import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reprise.errors import DataError, count_of
from trainer.data.corpus import refuse_shared
from trainer.data.encoding import Encoded
from trainer.data.prepared import (
    FILE_TOKENS,
    Prepared,
    Progress,
    check_file_tokens,
    numbered,
    prepared_folder,
    write_side,
)
from trainer.data.text import BYTES, open_encoder
from trainer.data.token_file import MAGICS, write_token_file

RAW_DTYPES = ("uint16", "uint32")
_CHUNK_BYTES = 8 * 2**20
_NUMPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class RawTokens:
    """The arrays' properties, and the size of the files to write.

    Args:
        dtype: one of RAW_DTYPES.
        tokenizer: the ``tokenizer.json`` of the tokens, or ``bytes``. Without a tokenizer, the largest token is taken
            for the end of text, and the vocabulary ends with it.
        file_tokens: maximum number of tokens per file.
    """

    dtype: str
    tokenizer: Path | None = None
    file_tokens: int = FILE_TOKENS


def write_raw(
    folder: Path,
    inputs: Mapping[str, Sequence[Path]],
    raw: RawTokens,
    *,
    force: bool = False,
    progress: Progress = lambda _title, _total: lambda _count: None,
) -> Prepared:
    """Write the tokens of headerless little-endian arrays as a folder of token files, which appears by one rename.

    Args:
        inputs: the arrays of each side, "train" and perhaps "valid", in their order.
        force: replace a folder with nothing except the output of an earlier call.

    Raises:
        DataError: an input is no such array or its tokenizer lacks a token, or the folder cannot be made.
    """
    check_file_tokens(raw.file_tokens)
    refuse_shared(inputs["train"], inputs.get("valid", ()))
    folder, dtype = Path(os.path.realpath(folder)), np.dtype(raw.dtype).newbyteorder("<")
    encoder = None if raw.tokenizer is None else open_encoder(raw.tokenizer)
    tokenizer = None if raw.tokenizer is None or str(raw.tokenizer) == BYTES else raw.tokenizer.absolute()
    read = [*itertools.chain(*inputs.values()), *filter(None, [tokenizer])]
    sides, largest = [], list[int]()
    with prepared_folder(folder, read, replace=force) as partial:
        for name, paths in inputs.items():
            count = progress(name, sum(_checked_size(path, dtype.itemsize) for path in paths))
            side = write_side(
                numbered(partial, name),
                _blocks(paths, dtype, largest),
                write=functools.partial(write_token_file, dtype=dtype),
                file_tokens=raw.file_tokens,
                count=count,
            )
            sides.append(replace(side.moved_to(folder), documents=None))
        if encoder is not None and max(largest) >= encoder.vocab_size:
            raise DataError(
                "A token does not belong to the tokenizer",
                where=raw.tokenizer,
                expected=f"0 to {encoder.vocab_size - 1}",
                found=max(largest),
                fix="Name the tokenizer that made the tokens, or the other dtype.",
            )
    if encoder is None:
        return Prepared(folder, tuple(sides), None, max(largest) + 1, max(largest), has_text=False)
    return Prepared(folder, tuple(sides), tokenizer, encoder.vocab_size, encoder.end_of_text)


def _blocks(paths: Sequence[Path], dtype: np.dtype[Any], largest: list[int]) -> Iterator[Encoded]:
    """Yield the tokens of all arrays in blocks of some megabytes, and append the largest token of each."""
    for path in paths:
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                if len(data) % dtype.itemsize:
                    raise _no_array(path, dtype.itemsize, "an odd number of bytes")
                tokens = np.frombuffer(data, dtype)
                largest.append(int(tokens.max()))
                yield Encoded(tokens, 0, len(data))


def _checked_size(path: Path, token_bytes: int) -> int:
    """Return the size of an array; refuse an array with the header of a known format."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0 or status.st_size % token_bytes:
        raise _no_array(path, token_bytes, count_of(status.st_size, "byte"))
    with path.open("rb") as file:
        begin = file.read(8)
    if begin.startswith(_NUMPY_MAGIC):
        raise _no_array(path, token_bytes, "a NumPy array: write it again by numpy.load(PATH).tofile(OTHER)")
    if len(begin) == 8 and tuple(np.frombuffer(begin, "<i4").tolist()) in MAGICS:
        raise _no_array(path, token_bytes, f"a token file: train on it with data=token_file data.train={path}")
    return status.st_size


def _no_array(path: Path, token_bytes: int, actual: str) -> DataError:
    return DataError(
        "A file is no array of tokens",
        where=path,
        expected=f"a file of {token_bytes} bytes a token, at least one, from the first byte on",
        found=actual,
    )
