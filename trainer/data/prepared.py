"""Writes a folder of token files from large files of text, atomically. Runs read it with ``data=token_file``, or with
``data=megatron`` where it has Megatron's format."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reprise.errors import DataError, count_of
from reprise.storage import FileCalls, atomic_output, is_dir, lexists
from trainer.data.blocks import SplitOptions, TextBlock, TextPart, read_blocks, split, texts
from trainer.data.bpe import train_bpe
from trainer.data.cuts import WORDS, Cuts
from trainer.data.data_file import TokenArray
from trainer.data.encoding import Encoded, encoding
from trainer.data.indexed_file import write_indexed_file
from trainer.data.section import DataKind
from trainer.data.sources import TextSource
from trainer.data.text import TOKENIZER, open_encoder
from trainer.data.token_file import MAX_TOKENS, write_token_file

FILE_TOKENS = 1 << 30
# A run that reads the folder keeps digests of the token files in it, see `trainer.data.digest_file`.
_OURS = re.compile(
    r"(train|valid)_\d{6}\.(bin|idx)|tokenizer\.json|\.(train|valid)_\d{6}\.bin\.digest(\.[0-9a-f]{16})?"
    r"|\.\.(train|valid)_\d{6}\.bin\.digest\.\d+-[0-9a-f]{8}\.partial"
)

# Takes the name of a step and the number of bytes it reads, None if unknown; returns the function that counts them.
Progress = Callable[[str, int | None], Callable[[int], object]]
WriteFile = Callable[[Path, Iterable[TokenArray]], None]


@dataclass(frozen=True, slots=True)
class PrepareOptions(SplitOptions):
    """Options of preparing a folder.

    Args:
        tokenizer: a ``tokenizer.json``; None for bytes.
        train_vocab_size: train a tokenizer with this many tokens on the training documents; 0 trains none.
        file_tokens: maximum number of tokens per file.
        kind: format of the files, `token_file` or `megatron`.
    """

    tokenizer: Path | None = None
    train_vocab_size: int = 0
    file_tokens: int = FILE_TOKENS
    kind: DataKind = DataKind.token_file


@dataclass(frozen=True, slots=True)
class Side:
    """A side of the split as written; `documents` is None if the input was tokens without document boundaries."""

    files: tuple[Path, ...]
    documents: int | None
    tokens: int

    @property
    def name(self) -> str:
        """Return its name, which its files begin with."""
        return self.files[0].name.partition("_")[0]

    def moved_to(self, folder: Path) -> Side:
        """Return the same side with its files in another folder."""
        return replace(self, files=tuple(folder / path.name for path in self.files))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A complete folder, with the values a run needs to read it.

    Args:
        tokenizer: a ``tokenizer.json``; None for bytes, and for tokens of unknown origin.
        has_text: whether tokens can be shown as text, by `tokenizer` or as bytes.
    """

    folder: Path
    sides: tuple[Side, ...]
    tokenizer: Path | None
    vocab_size: int
    end_of_text: int
    has_text: bool = True
    kind: DataKind = DataKind.token_file


def write_prepared(
    folder: Path,
    inputs: Sequence[TextSource],
    options: PrepareOptions,
    *,
    workers: int,
    replace: bool = False,
    progress: Progress = lambda _title, _total: lambda _count: None,
) -> Prepared:
    """Write the token files of the inputs, in their order, as a folder, which appears by one rename.

    Its bytes depend on the inputs and the options, never on `workers`.

    Args:
        replace: replace a folder with nothing except the output of an earlier call.

    Raises:
        DataError: an input cannot be read or encoded, or the folder cannot be made.
    """
    if not 0 <= options.valid_fraction < 1:
        raise DataError(
            "No such share can be held out", expected="0, or above 0 and below 1", found=options.valid_fraction
        )
    check_file_tokens(options.file_tokens)
    folder, tokenizer, sides = Path(os.path.realpath(folder)), options.tokenizer, list[Side]()
    read = [*(source.path for source in inputs), *filter(None, [tokenizer])]
    with prepared_folder(folder, read, replace=replace) as new:
        parts = split(inputs, options)
        if options.train_vocab_size:
            tokenizer = new / TOKENIZER
            _train(parts["train"], options.train_vocab_size, tokenizer, progress)
        encoder = open_encoder(tokenizer)
        write = _writer(options.kind, encoder.dtype, encoder.end_of_text)
        cuts = encoder.cuts()
        with encoding(encoder, tokenizer, workers=workers) as encode:
            for name, of_side in parts.items():
                side = write_side(
                    numbered(new, name),
                    encode(blocks_of(of_side, cuts)),
                    write=write,
                    file_tokens=options.file_tokens,
                    count=progress(name, _total(of_side)),
                )
                if not side.documents:
                    raise DataError(
                        f"No document is on the side {name}",
                        found=f"{count_of(len(of_side), 'file')}, --valid-fraction {options.valid_fraction}",
                        fix="Give more documents, or another --valid-fraction.",
                    )
                sides.append(side.moved_to(folder))
    tokenizer = folder / TOKENIZER if options.train_vocab_size else tokenizer and tokenizer.absolute()
    return Prepared(folder, tuple(sides), tokenizer, encoder.vocab_size, encoder.end_of_text, kind=options.kind)


@contextmanager
def prepared_folder(folder: Path, read: Sequence[Path], *, replace: bool) -> Iterator[Path]:
    """Yield a new folder to write to, which becomes `folder`, a real path; it is removed on an error.

    Args:
        read: the input files; none may lie in `folder`.
        replace: replace a folder with nothing except the output of an earlier call.

    Raises:
        DataError: the folder cannot be made, or an existing folder must not be replaced.
    """
    try:
        _refuse_to_overwrite(folder, read, replace=replace)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_output(folder, FileCalls(), replaces=True) as partial:
            partial.mkdir()
            yield partial
    except OSError as error:
        raise DataError(
            "Token files cannot be made",
            where=error.filename or folder,
            found=error.strerror or str(error),
            fix="Check space and permissions, or name another folder.",
        ) from error


def check_file_tokens(file_tokens: int) -> None:
    """Refuse an invalid number of tokens per file.

    Raises:
        DataError: if it is out of range.
    """
    if not 1 <= file_tokens <= MAX_TOKENS:
        raise DataError("No token file has such a size", expected=f"1 to {MAX_TOKENS} tokens", found=file_tokens)


def _refuse_to_overwrite(folder: Path, read: Iterable[Path], *, replace: bool) -> None:
    is_file = lexists(folder) and not is_dir(folder)
    names = sorted(path.name for path in folder.iterdir()) if is_dir(folder) else []
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    inputs = [path for path in read if folder in Path(os.path.realpath(path)).parents]
    if is_file or foreign or inputs or (names and not replace):
        raise DataError(
            "A folder cannot be made in the place of what is there",
            where=folder if foreign or not inputs else inputs[0],
            expected="nothing, or with --force token files of an earlier call, none of which is read",
            found="a file" if is_file else ", ".join((foreign or names)[:5]),
            fix="Name another folder, or replace token files with --force.",
        )


def _train(parts: Sequence[TextPart], vocab_size: int, path: Path, progress: Progress) -> None:
    """Train a tokenizer on the documents of a side and write it."""
    count = progress("tokenizer", _total(parts))

    def training_texts() -> Iterator[str]:
        for block in blocks_of(parts, WORDS):
            yield from texts(block)
            count(len(block.data))

    FileCalls().write_whole(path, train_bpe(training_texts(), vocab_size))


def _writer(kind: DataKind, dtype: np.dtype[Any], end_of_text: int) -> WriteFile:
    """Return the writer of a token file in a format."""
    if kind is DataKind.megatron:
        return partial(write_indexed_file, dtype=dtype, end_of_text=end_of_text)
    return partial(write_token_file, dtype=dtype)


def numbered(folder: Path, name: str) -> Callable[[int], Path]:
    """Return the paths of a side's files by their numbers."""
    return lambda number: folder / f"{name}_{number:06d}.bin"


def write_side(
    path_of: Callable[[int], Path],
    blocks: Iterable[Encoded],
    *,
    write: WriteFile,
    file_tokens: int,
    count: Callable[[int], object] = lambda _count: None,
) -> Side:
    """Write a side of a split as token files of at most `file_tokens` tokens; without tokens, one that is empty.

    Args:
        write: writes a file of tokens.
        count: called with the number of input bytes consumed since the last call.

    Raises:
        DataError: a file cannot be written.
    """
    stream, files = _Stream(blocks, count), list[Path]()
    while stream.has_more() or not files:
        files.append(path_of(len(files)))
        write(files[-1], stream.take(file_tokens))
    return Side(tuple(files), stream.documents, stream.tokens)


class _Stream:
    """Encoded blocks as a stream of tokens."""

    def __init__(self, blocks: Iterable[Encoded], count: Callable[[int], object]) -> None:
        self._blocks, self._count = iter(blocks), count
        self._rest: TokenArray = np.empty(0, np.uint16)
        self.documents = self.tokens = 0

    def has_more(self) -> bool:
        """Return whether a token is left, reading on to the next."""
        while not self._rest.size:
            block = next(self._blocks, None)
            if block is None:
                return False
            self._rest = block.tokens
            self.documents += block.documents
            self._count(block.read_bytes)
        return True

    def take(self, most: int) -> Iterator[TokenArray]:
        """Yield the next tokens, at most `most`."""
        while most and self.has_more():
            chunk, self._rest = self._rest[:most], self._rest[most:]
            most -= chunk.size
            self.tokens += chunk.size
            yield chunk


def blocks_of(parts: Iterable[TextPart], cuts: Cuts) -> Iterator[TextBlock]:
    """Yield the blocks of all parts of a side."""
    for part in parts:
        yield from read_blocks(part, cuts)


def _total(parts: Sequence[TextPart]) -> int | None:
    """Return the bytes of the text; None where a file is compressed."""
    ends = [end for part in parts if (end := part.size_bytes if part.stop is None else part.stop) is not None]
    return sum(ends) - sum(part.start for part in parts) if len(ends) == len(parts) else None
