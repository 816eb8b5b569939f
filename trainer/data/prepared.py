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
import xxhash

from reprise.errors import DataError, count_of
from reprise.files import FileCalls, atomic_output, is_dir, lexists
from trainer.data.blocks import (
    BLOCK_BYTES,
    HASHES,
    SplitRule,
    TextBlock,
    TextForm,
    read_blocks,
    start_of_character,
    texts,
)
from trainer.data.bpe import train_bpe
from trainer.data.cuts import WORDS, Cuts
from trainer.data.encoding import Encode, Encoded, dtype_of, encoding
from trainer.data.indexed_file import write_indexed_file
from trainer.data.section import DataKind
from trainer.data.text import TOKENIZER, Document, as_characters, open_encoder
from trainer.data.text_file import Span, open_text, plain_name, text_bytes, text_span
from trainer.data.token_file import MAX_TOKENS, TokenArray, write_token_file

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
class PrepareOptions:
    """Options of preparing a folder.

    Args:
        form: form of all input files.
        key: key of the text in a JSON object, and the column of a Parquet file.
        tokenizer: a ``tokenizer.json``; None for bytes.
        train_vocab_size: train a tokenizer with this many tokens on the training documents; 0 trains none.
        valid_fraction: share of the documents that is held out (of bytes, for a single text); 0 holds out none.
        file_tokens: maximum number of tokens per file.
        kind: format of the files, `token_file` or `megatron`.
        takes_bytes: accept files that are not text, as bytes.
    """

    form: TextForm
    key: str = "text"
    tokenizer: Path | None = None
    train_vocab_size: int = 0
    valid_fraction: float = 0.0
    file_tokens: int = FILE_TOKENS
    block_bytes: int = BLOCK_BYTES
    kind: DataKind = DataKind.token_file
    takes_bytes: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """A side of the split as written; `documents` is None if the input was tokens without document boundaries."""

    name: str
    files: tuple[Path, ...]
    documents: int | None
    tokens: int

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


@dataclass(frozen=True, slots=True)
class _Part:
    """The input of a side of the split."""

    name: str
    spans: tuple[Span, ...]
    rule: SplitRule


def write_prepared(
    folder: Path,
    inputs: Sequence[Path],
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
    _check(options)
    folder = Path(os.path.realpath(folder))
    with prepared_folder(folder, [*inputs, *filter(None, [options.tokenizer])], replace=replace) as new:
        parts = _split(inputs, options)
        tokenizer = options.tokenizer
        if options.train_vocab_size:
            tokenizer = new / TOKENIZER
            _train(parts[0], options, tokenizer, progress)
        encoder = open_encoder(tokenizer)
        with encoding(tokenizer, workers=workers) as encode:
            write = _writer(options.kind, dtype_of(encoder), encoder.end_of_text)
            cuts = encoder.cuts()
            sides = [_write_side(new, part, options, cuts, encode, write, progress) for part in parts]
    placed = tuple(side.moved_to(folder) for side in sides)
    tokenizer = folder / TOKENIZER if options.train_vocab_size else options.tokenizer and options.tokenizer.absolute()
    return Prepared(folder, placed, tokenizer, encoder.vocab_size, encoder.end_of_text, kind=options.kind)


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
        _refuse_to_overwrite(folder, replace=replace)
        _refuse_to_replace_inputs(folder, read)
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


def _check(options: PrepareOptions) -> None:
    if not 0 <= options.valid_fraction < 1:
        raise DataError(
            "No such share can be held out", expected="0, or above 0 and below 1", found=options.valid_fraction
        )
    check_file_tokens(options.file_tokens)


def check_file_tokens(file_tokens: int) -> None:
    """Refuse an invalid number of tokens per file.

    Raises:
        DataError: if it is out of range.
    """
    if not 1 <= file_tokens <= MAX_TOKENS:
        raise DataError("No token file has such a size", expected=f"1 to {MAX_TOKENS} tokens", found=file_tokens)


def _refuse_to_overwrite(folder: Path, *, replace: bool) -> None:
    if not lexists(folder):
        return
    if not is_dir(folder):
        raise DataError("A file has the name of the folder to make", where=folder, fix="Name another folder.")
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign and replace:
        raise DataError(
            "A folder holds something else than token files and is not replaced",
            where=folder,
            found=", ".join(foreign[:5]),
            fix="Name another folder, or move these away.",
        )
    if names and not replace:
        raise DataError("A folder is there already", where=folder, fix="Name another one, or replace it with --force.")


def _refuse_to_replace_inputs(folder: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        if folder in Path(os.path.realpath(path)).parents:
            raise DataError(
                "A file to read lies in the folder to make, which replaces all that is there",
                where=path,
                fix="Name another folder, or move the file away.",
            )


def _split(inputs: Sequence[Path], options: PrepareOptions) -> list[_Part]:
    """Return the input of each side, training documents first.

    JSON lines are split by the hash of their text, so equal texts are on the same side; several texts are split by the
    hash of their names, without the suffix of a compression; of a single text the end is held out.
    """
    spans = tuple(text_span(path) for path in inputs)
    limit = int(options.valid_fraction * HASHES)
    everything = SplitRule(options.form, options.key)
    if not limit:
        return [_Part("train", spans, everything)]
    if options.form is TextForm.jsonl:
        shares = {"train": (limit, HASHES), "valid": (0, limit)}
        return [_Part(name, spans, SplitRule(options.form, options.key, share)) for name, share in shares.items()]
    if len(spans) == 1:
        cut = _cut(inputs[0], options)
        train, valid = [Span(inputs[0], 0, cut)], [Span(inputs[0], cut, spans[0].hi)]
    else:
        hashed = {span: xxhash.xxh3_64_intdigest(os.fsencode(plain_name(span.path.name))) for span in spans}
        train = [span for span in spans if hashed[span] >= limit]
        valid = [span for span in spans if hashed[span] < limit]
    return [_Part("train", tuple(train), everything), _Part("valid", tuple(valid), everything)]


def _cut(path: Path, options: PrepareOptions) -> int:
    """Return the start of the held-out end of a single text, between two characters."""
    size = text_bytes(path, takes_bytes=options.takes_bytes)
    at = size - round(size * options.valid_fraction)
    with open_text(Span(path, max(0, at - 4), at), takes_bytes=options.takes_bytes, checks_utf8=False) as reader:
        before = reader.read(4)
    return at - len(before) + start_of_character(before, len(before))


def _train(part: _Part, options: PrepareOptions, path: Path, progress: Progress) -> None:
    """Train a tokenizer on the documents of a side and write it."""
    count = progress("tokenizer", _total(part))

    def training_texts() -> Iterator[str]:
        for block in _blocks(part, options, WORDS):
            yield from (as_characters(Document(block.path, text, block.offset)) for text in texts(block, part.rule))
            count(len(block.data))

    FileCalls().write_whole(path, train_bpe(training_texts(), options.train_vocab_size))


def _writer(kind: DataKind, dtype: np.dtype[Any], end_of_text: int) -> WriteFile:
    """Return the writer of a token file in a format."""
    if kind is DataKind.megatron:
        return partial(write_indexed_file, dtype=dtype, end_of_text=end_of_text)
    return partial(write_token_file, dtype=dtype)


def _write_side(
    folder: Path,
    part: _Part,
    options: PrepareOptions,
    cuts: Cuts,
    encode: Encode,
    write: WriteFile,
    progress: Progress,
) -> Side:
    blocks = encode(_blocks(part, options, cuts), part.rule)
    count = progress(part.name, _total(part))
    side = write_side(folder, part.name, blocks, write=write, file_tokens=options.file_tokens, count=count)
    if not side.documents:
        raise DataError(
            f"No document is on the side {part.name}",
            found=f"{count_of(len(part.spans), 'file')}, --valid-fraction {options.valid_fraction}",
            fix="Give more documents, or another --valid-fraction.",
        )
    return side


def write_side(
    folder: Path,
    name: str,
    blocks: Iterable[Encoded],
    *,
    write: WriteFile,
    file_tokens: int,
    count: Callable[[int], object],
) -> Side:
    """Write a side of a split as token files of at most `file_tokens` tokens, named by side and number.

    Args:
        write: writes a file of tokens.
        count: called with the number of input bytes consumed since the last call.

    Raises:
        DataError: a file cannot be written.
    """
    stream = _Stream(blocks, count)
    files: list[Path] = []
    while stream.has_more():
        files.append(folder / f"{name}_{len(files):06d}.bin")
        write(files[-1], stream.take(file_tokens))
    return Side(name, tuple(files), stream.documents, stream.tokens)


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


def _blocks(part: _Part, options: PrepareOptions, cuts: Cuts) -> Iterator[TextBlock]:
    for span in part.spans:
        yield from read_blocks(
            span, options.form, cuts, key=options.key, takes_bytes=options.takes_bytes, block_bytes=options.block_bytes
        )


def _total(part: _Part) -> int | None:
    """Return the bytes of the text; None where a file is compressed."""
    sizes = [span.hi - span.lo for span in part.spans if span.hi is not None]
    return sum(sizes) if len(sizes) == len(part.spans) else None
