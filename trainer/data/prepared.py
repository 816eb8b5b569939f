"""Writes a folder with token files from large text or token files, atomically.

Runs read it with ``data=token_file``, or ``data=megatron`` for Megatron's format.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from reprise.errors import DataError
from trainer.data.blocks import SplitOptions, read_blocks, split
from trainer.data.data_file import TokenArray, new_path
from trainer.data.encoding import Encoded, encoding
from trainer.data.indexed_file import write_indexed_file
from trainer.data.section import DataKind
from trainer.data.sources import TextSource
from trainer.data.text import BYTES, open_encoder
from trainer.data.token_file import MAX_TOKENS, open_token_array, open_token_files, write_token_file

FILE_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class PrepareOptions(SplitOptions):
    """Options for preparing a folder.

    Args:
        tokenizer: A ``tokenizer.json``, or `BYTES`. None means bytes for texts, and an unknown tokenizer for token
            arrays: the largest token is taken as end of text, and ends the vocabulary.
        file_tokens: Maximum tokens per file.
        kind: File format, `token_file` or `megatron`.
        array: The inputs are token arrays with this dtype, not texts.
        held_out: Further token arrays, for validation.
    """

    tokenizer: str | Path | None = None
    file_tokens: int = FILE_TOKENS
    kind: DataKind = DataKind.token_file
    array: np.dtype[Any] | None = None
    held_out: Sequence[TextSource] = ()


@dataclass(slots=True)
class Side:
    """A written side of the split. Its name starts its file names.

    Args:
        documents: 0 if the input was tokens without document boundaries.
    """

    name: str
    files: int = 0
    documents: int = 0
    tokens: int = 0
    largest: int = -1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A complete folder, with the values a run needs to read it.

    Args:
        tokenizer: A ``tokenizer.json``, or `BYTES`. None if unknown.
    """

    folder: Path
    sides: Sequence[Side]
    tokenizer: str | Path | None
    vocab_size: int
    end_of_text: int


def write_prepared(folder: Path, inputs: Sequence[TextSource], options: PrepareOptions, *, workers: int) -> Prepared:
    """Write the inputs' token files, in order, as a folder, which appears by a single rename.

    A terminal shows the bytes read.

    Args:
        workers: Encoding processes. The folder's bytes never depend on their number.

    Raises:
        DataError: An input cannot be read or encoded, or the folder exists or cannot be created.
    """
    folder, array, sides = Path(os.path.realpath(folder)), options.array, list[Side]()
    tokenizer = options.tokenizer or (None if array else BYTES)
    encoder = open_encoder(tokenizer)
    with new_path(folder, replaces=False) as new:
        new.mkdir()
        parts = {} if array else split(inputs, options)
        write = partial(write_token_file, dtype=array or encoder.dtype)
        if options.kind is DataKind.megatron:
            write = partial(write_indexed_file, dtype=encoder.dtype, end_of_text=encoder.end_of_text)
        with encoding(encoder, tokenizer or BYTES, workers=workers) as encode:
            blocks = {name: encode(read_blocks(members, encoder.cuts)) for name, members in parts.items()}
            if array:
                arrays = {"train": inputs, "valid": options.held_out}
                blocks = {name: _read_arrays(files, array) for name, files in arrays.items() if files}
            for name, members in blocks.items():
                sides.append(_write_side(new, name, members, write, options))
        largest = max(side.largest for side in sides)
        if tokenizer is None:
            return Prepared(folder, sides, None, largest + 1, largest)
        if largest >= encoder.vocab_size:
            raise DataError(
                "A token is outside the tokenizer's vocabulary",
                where=tokenizer,
                expected=f"0 to {encoder.vocab_size - 1}",
                found=largest,
                fix="Pass the tokenizer that made the tokens, or the other dtype.",
            )
    if isinstance(tokenizer, Path):
        tokenizer = tokenizer.absolute()
    return Prepared(folder, sides, tokenizer, encoder.vocab_size, encoder.end_of_text)


def _read_arrays(sources: Sequence[TextSource], dtype: np.dtype[Any]) -> Iterator[Encoded]:
    """Open arrays, and return their tokens, in order.

    Raises:
        DataError: A file cannot be read or is not an array with this dtype; from the iterator, a file has changed.
    """
    files = open_token_files([source.path for source in sources], partial(open_token_array, dtype=dtype))

    def read() -> Iterator[Encoded]:
        for source, file in zip(sources, files, strict=True):
            for tokens in file.chunks():
                yield Encoded(tokens, 0, tokens.nbytes)
            source.check_unchanged()

    return read()


def _write_side(
    folder: Path,
    name: str,
    blocks: Iterable[Encoded],
    write: Callable[[Path, Iterable[TokenArray]], None],
    options: PrepareOptions,
) -> Side:
    """Write a side of the split as token files with at most `options.file_tokens` tokens.

    Args:
        write: Writes a token file.

    Raises:
        DataError: A file cannot be written, or there is no document.
    """
    side, file_tokens = Side(name), min(options.file_tokens, MAX_TOKENS)

    def pieces() -> Iterator[tuple[int, TokenArray]]:
        """Yield pieces of the tokens, each within a single file, with the file's number."""
        for block in blocks:
            side.documents += block.documents
            side.largest = max(side.largest, int(block.tokens.max(initial=0)))
            chunk = block.tokens
            while chunk.size:
                piece = chunk[: file_tokens - side.tokens % file_tokens]
                yield side.tokens // file_tokens, piece
                side.tokens, chunk = side.tokens + piece.size, chunk[piece.size :]
            bar.update(block.read_bytes)

    with tqdm(desc=name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for number, members in itertools.groupby(pieces(), itemgetter(0)):
            write(folder / f"{name}_{number:06d}.bin", map(itemgetter(1), members))
            side.files += 1
    if not (side.documents or options.array):
        raise DataError(
            f"The {name} split has no document",
            found=f"--valid-fraction {options.valid_fraction}",
            fix="Add documents, or change --valid-fraction.",
        )
    return side
