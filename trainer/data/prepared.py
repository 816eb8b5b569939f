"""Writes a folder with token files from large text or token files, atomically.

Runs read it with ``data=token_file``, or ``data=megatron`` for Megatron's format.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from reprise.errors import DataError
from reprise.storage import FILE_SYSTEM, atomic_output, is_dir, lexists
from trainer.data.blocks import SplitOptions, TextPart, read_blocks, split, texts
from trainer.data.bpe import train_bpe
from trainer.data.cuts import WORDS
from trainer.data.data_file import TokenArray
from trainer.data.encoding import Encoded, encoding
from trainer.data.indexed_file import write_indexed_file
from trainer.data.section import DataKind
from trainer.data.sources import TextSource
from trainer.data.text import BYTES, TOKENIZER, open_encoder
from trainer.data.token_file import MAX_TOKENS, open_token_array, open_token_files, write_token_file

FILE_TOKENS = 1 << 30
# A run that reads the folder stores token file digests in it, see `trainer.data.digest_file`.
_OURS = re.compile(
    r"(train|valid)_\d{6}\.(bin|idx)|tokenizer\.json|\.(train|valid)_\d{6}\.bin\.digest(\.[0-9a-f]{16})?"
    r"|\.\.(train|valid)_\d{6}\.bin\.digest\.\d+-[0-9a-f]{8}\.partial"
)

# Takes a step's name. Returns a function that counts the bytes read.
Progress = Callable[[str], Callable[[int], object]]


@dataclass(frozen=True, slots=True)
class PrepareOptions(SplitOptions):
    """Options for preparing a folder.

    Args:
        tokenizer: A ``tokenizer.json``, or `BYTES`. None means bytes for texts, and an unknown tokenizer for token
            arrays: the largest token is taken as end of text, and ends the vocabulary.
        train_vocab_size: Train a tokenizer with this vocabulary size on the training documents. 0 trains none.
        file_tokens: Maximum tokens per file.
        kind: File format, `token_file` or `megatron`.
        array: The inputs are token arrays with this dtype, not texts.
        held_out: Further token arrays, for validation.
    """

    tokenizer: str | Path | None = None
    train_vocab_size: int = 0
    file_tokens: int = FILE_TOKENS
    kind: DataKind = DataKind.token_file
    array: np.dtype[Any] | None = None
    held_out: Sequence[TextSource] = ()


@dataclass(slots=True)
class Side:
    """A written side of the split. `documents` is 0 if the input was tokens without document boundaries."""

    files: list[Path]
    documents: int = 0
    tokens: int = 0
    largest: int = -1

    @property
    def name(self) -> str:
        """Return the side's name, which its file names start with."""
        return self.files[0].name.partition("_")[0]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A complete folder, with the values a run needs to read it.

    Args:
        tokenizer: A ``tokenizer.json``, or `BYTES`. None if unknown.
    """

    sides: tuple[Side, ...]
    tokenizer: str | Path | None
    vocab_size: int
    end_of_text: int
    kind: DataKind = DataKind.token_file


def write_prepared(
    folder: Path,
    inputs: Sequence[TextSource],
    options: PrepareOptions,
    *,
    workers: int,
    replace: bool = False,
    progress: Progress = lambda _title: lambda _count: None,
) -> Prepared:
    """Write the inputs' token files, in order, as a folder, which appears by a single rename.

    Args:
        workers: Encoding processes. The folder's bytes never depend on their number.
        replace: Replace a folder containing only an earlier call's output.

    Raises:
        DataError: An input cannot be read or encoded, or the folder cannot be created.
    """
    _check(options)
    folder, array, sides = Path(os.path.realpath(folder)), options.array, list[Side]()
    tokenizer = options.tokenizer or (None if array else BYTES)
    read = [source.path for source in (*inputs, *options.held_out)]
    read += [tokenizer] if isinstance(tokenizer, Path) else []
    with _new_folder(folder, read, replace=replace) as new:
        parts = {} if array else split(inputs, options)
        if options.train_vocab_size:
            tokenizer = new / TOKENIZER
            _train(parts["train"], options.train_vocab_size, tokenizer, progress)
        encoder = open_encoder(tokenizer)
        write = partial(write_token_file, dtype=array or encoder.dtype)
        if options.kind is DataKind.megatron:
            write = partial(write_indexed_file, dtype=encoder.dtype, end_of_text=encoder.end_of_text)
        with encoding(encoder, tokenizer or BYTES, workers=workers) as encode:
            blocks = {name: encode(read_blocks(members, encoder.cuts)) for name, members in parts.items()}
            if array:
                arrays = {"train": inputs, "valid": options.held_out}
                blocks = {name: _read_arrays(files, array) for name, files in arrays.items() if files}
            for name, members in blocks.items():
                side = _write_side(new, name, members, write=write, options=options, count=progress(name))
                sides.append(dataclasses.replace(side, files=[folder / path.name for path in side.files]))
        largest = max(side.largest for side in sides)
        if tokenizer is None:
            return Prepared(tuple(sides), None, largest + 1, largest)
        if largest >= encoder.vocab_size:
            raise DataError(
                "A token is outside the tokenizer's vocabulary",
                where=tokenizer,
                expected=f"0 to {encoder.vocab_size - 1}",
                found=largest,
                fix="Pass the tokenizer that made the tokens, or the other dtype.",
            )
    if isinstance(tokenizer, Path):
        tokenizer = folder / TOKENIZER if options.train_vocab_size else tokenizer.absolute()
    return Prepared(tuple(sides), tokenizer, encoder.vocab_size, encoder.end_of_text, options.kind)


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


def _check(options: PrepareOptions) -> None:
    share, size = options.valid_fraction, options.file_tokens
    if not 0 <= share < 1:
        raise DataError("The held-out share is out of range", expected="0, or above 0 and below 1", found=share)
    if not 1 <= size <= MAX_TOKENS:
        raise DataError("The token file size is out of range", expected=f"1 to {MAX_TOKENS} tokens", found=size)


@contextmanager
def _new_folder(folder: Path, read: Sequence[Path], *, replace: bool) -> Iterator[Path]:
    """Yield a new folder to write to, which becomes `folder`, a real path. It is removed on an error.

    Args:
        read: The input files, none of them in `folder`.
        replace: Replace a folder containing only an earlier call's output.

    Raises:
        DataError: The folder cannot be created, or an existing folder must not be replaced.
    """
    try:
        _refuse_to_overwrite(folder, read, replace=replace)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_output(folder, FILE_SYSTEM, replaces=True) as partial:
            partial.mkdir()
            yield partial
    except OSError as error:
        raise DataError(
            "Token files cannot be made",
            where=error.filename or folder,
            found=error.strerror or str(error),
            fix="Check free space and permissions, or choose another folder.",
        ) from error


def _refuse_to_overwrite(folder: Path, read: Iterable[Path], *, replace: bool) -> None:
    names = sorted(path.name for path in folder.iterdir()) if is_dir(folder) else ["a file"] * lexists(folder)
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    inputs = [path for path in read if folder in Path(os.path.realpath(path)).parents]
    if foreign or inputs or (names and not replace):
        raise DataError(
            "An existing file or folder cannot be replaced",
            where=folder if foreign or not inputs else inputs[0],
            expected="nothing, or with --force token files of an earlier call that are not inputs",
            found=", ".join((foreign or names)[:5]),
            fix="Choose another folder, or replace token files with --force.",
        )


def _train(parts: Sequence[TextPart], vocab_size: int, path: Path, progress: Progress) -> None:
    """Train a tokenizer on a side's documents and write it."""
    count = progress("tokenizer")

    def training_texts() -> Iterator[str]:
        for block in read_blocks(parts, WORDS):
            yield from texts(block)
            count(len(block.data))

    FILE_SYSTEM.write_whole(path, train_bpe(training_texts(), vocab_size))


def _write_side(
    folder: Path,
    name: str,
    blocks: Iterable[Encoded],
    *,
    write: Callable[[Path, Iterable[TokenArray]], None],
    options: PrepareOptions,
    count: Callable[[int], object],
) -> Side:
    """Write a side of the split as token files with at most `options.file_tokens` tokens.

    Args:
        write: Writes a token file.
        count: Called with the number of input bytes consumed since the last call.

    Raises:
        DataError: A file cannot be written, or there is no document.
    """
    side, file_tokens = Side([]), options.file_tokens

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
            count(block.read_bytes)

    for number, members in itertools.groupby(pieces(), itemgetter(0)):
        side.files.append(folder / f"{name}_{number:06d}.bin")
        write(side.files[-1], map(itemgetter(1), members))
    if not (side.documents or options.array):
        raise DataError(
            f"The {name} split has no document",
            found=f"--valid-fraction {options.valid_fraction}",
            fix="Add documents, or change --valid-fraction.",
        )
    return side
