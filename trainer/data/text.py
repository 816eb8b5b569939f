"""Text files to tokens: finding files, splitting them into train and valid, encoding bytes or with a tokenizer."""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import xxhash

from reprise.errors import DataError
from reprise.files import exists, files_of, is_dir, is_file, is_stored, is_symlink, read_regular
from trainer.data.blocks import SplitRule, TextBlock, TextForm, texts
from trainer.data.byte_level import END_OF_TEXT, END_OF_TEXT_ID, bytes_tokenizer
from trainer.data.cuts import ANYWHERE, Cuts, cuts_of
from trainer.data.json_lines import is_json_lines
from trainer.data.parquet import column_texts, row_count
from trainer.data.text_file import (
    FileForm,
    Span,
    file_form,
    not_utf8,
    open_text,
    plain_name,
    unreadable,
)
from trainer.data.token_file import TokenArray, listed

_log = logging.getLogger(__name__)

# Tests say little about the language and much about their fixtures; the others hold programs and their tests.
_STDLIB_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
)
# Written by the build or the distribution: the text differs between two installations of one version.
_STDLIB_EXCLUDED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>")
# It is saved beside every checkpoint; the largest in use are below 40 MiB.
MOST_TOKENIZER_BYTES = 64 << 20
# Of the texts of `data=text` in Parquet and JSON lines.
DOCUMENT_KEY = "text"


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text file; ``name`` is its posix path relative to the root of its data set."""

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Document:
    """A text ended by an end-of-text token, or a part of such a text.

    ``path`` is its file, ``offset`` its start in the file.
    """

    path: Path
    text: bytes
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Encoder:
    """Converts documents to tokens and back; two encoders with the same ``label`` give the same tokens.

    ``decode`` takes any numbers: an invalid token, or a part of a character, appears as such or not at all. ``cuts``
    returns where a text may be cut: the tokens of its parts are then those of the whole.
    """

    label: str
    vocab_size: int
    end_of_text: int
    encode: Callable[[Document], TokenArray]
    decode: Callable[[Sequence[int]], str]
    cuts: Callable[[], Cuts]


BYTES = "bytes"


def open_encoder(tokenizer: str | Path | None) -> Encoder:
    """Return the encoder of a ``tokenizer.json``, or the encoder of bytes for "bytes" or None.

    Raises:
        DataError: the file is not a usable tokenizer.
    """
    if tokenizer is None or str(tokenizer) == BYTES:
        return bytes_encoder()
    return load_encoder(tokenizer if isinstance(tokenizer, Path) else Path(tokenizer).expanduser())


def bytes_encoder() -> Encoder:
    """Return the encoder whose tokens are the bytes 0 to 255 and whose end of text is 256."""

    def decode(tokens: Sequence[int]) -> str:
        pieces = (bytes([t]) if t < 256 else END_OF_TEXT.encode() if t == END_OF_TEXT_ID else b"" for t in tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    return Encoder(
        label=BYTES,
        vocab_size=END_OF_TEXT_ID + 1,
        end_of_text=END_OF_TEXT_ID,
        encode=lambda document: np.frombuffer(document.text, np.uint8),
        decode=decode,
        cuts=lambda: ANYWHERE,
    )


def load_encoder(path: Path) -> Encoder:
    """Read a ``tokenizer.json`` with the `tokenizers` package, which the tokenizer of bytes does not need.

    Truncation, padding and dropout in the file are switched off, and a line says so.

    Raises:
        DataError: the package is missing, the file is not a tokenizer, or it has no end-of-text token.
    """
    raw = read_tokenizer(path)
    if raw == bytes_tokenizer():
        return bytes_encoder()
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "data.tokenizer needs the tokenizers package", where=path, fix="Install it: pip install tokenizers."
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(raw)
    except ValueError as error:
        raise DataError(
            "a tokenizer cannot be loaded", where=path, expected="a tokenizer.json of tokenizers", found=str(error)
        ) from error
    if changes := _switch_off_changes(tokenizer):
        _report_once(f"{path}: texts are encoded without its {changes}")
    # A text that only mentions "<|endoftext|>" is ordinary text.
    tokenizer.encode_special_tokens = True
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder().values()
    name = end_of_text_name(path, vocabulary, {token.content for token in added if token.special})
    if name is None:
        raise DataError(
            "a tokenizer has no end-of-text token",
            where=path,
            expected=f"one of {', '.join(END_OF_TEXT_NAMES)}, or the eos_token of a {TOKENIZER_CONFIG}",
            found=f"none among {len(vocabulary)} tokens",
            fix="Add one of them to the tokenizer.",
        )
    end_of_text = vocabulary[name]

    def encode(document: Document) -> TokenArray:
        ids = tokenizer.encode(as_characters(document), add_special_tokens=False).ids
        return np.array(ids, dtype=np.uint32)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    label = f"tokenizers {tokenizers.__version__} {xxhash.xxh3_64_hexdigest(raw)} {end_of_text} {changes}"
    # Ids may have holes, so the largest counts, not how many there are.
    return Encoder(label, max(vocabulary.values()) + 1, end_of_text, encode, decode, partial(cuts_of, tokenizer))


def _switch_off_changes(tokenizer: Any) -> str:
    """Switch off whatever leaves out, adds or draws tokens, and return its names."""
    dropout = getattr(tokenizer.model, "dropout", None)
    settings = {"truncation": tokenizer.truncation, "padding": tokenizer.padding, "dropout": dropout}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if dropout:
        tokenizer.model.dropout = None
    return ", ".join(name for name, setting in settings.items() if setting)


@cache
def _report_once(line: str) -> None:
    _log.warning(line)


def end_of_text_name(path: Path, names: Collection[str], special: Collection[str]) -> str | None:
    """Return the token that ends a text, or None.

    It is the ``eos_token`` of the ``tokenizer_config.json`` beside a ``tokenizer.json``, else the first of
    `END_OF_TEXT_NAMES` among the special tokens, else the first among all.

    Args:
        path: the tokenizer's file; a `NAME.json` has its configuration in `NAME_config.json`.
        names: all of its tokens.
        special: its special tokens.

    Raises:
        DataError: the configuration cannot be read, or names a token that the tokenizer lacks.
    """
    config = path.with_name(f"{path.stem}_config.json")
    if (name := _configured_end_of_text(config)) is None:
        return next((name for tokens in (special, names) for name in END_OF_TEXT_NAMES if name in tokens), None)
    if name not in names:
        raise DataError(
            "a tokenizer lacks the end of text in its configuration",
            where=path,
            expected=f"the eos_token of {config.name}, {name!r}",
            found=f"no such token among {len(names)}",
            fix=f"Correct {config.name}, or add the token to the tokenizer.",
        )
    return name


def _configured_end_of_text(config: Path) -> str | None:
    """Return the ``eos_token`` of a ``tokenizer_config.json``, which is text or an object with its content."""
    try:
        if not exists(config):
            return None
    except OSError as error:
        raise unreadable(config, error) from error
    try:
        token = json.loads(read_tokenizer(config)).get("eos_token")
        name = token["content"] if isinstance(token, dict) else token
        if name is None or isinstance(name, str):
            return name
        problem = f"an eos_token of {name!r}"
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        problem = repr(error)
    raise DataError(
        "a tokenizer's configuration cannot be read",
        where=config,
        expected="a JSON object, with a text as its eos_token if any",
        found=problem,
        fix="Correct the file, or remove it.",
    )


def read_tokenizer(path: Path) -> bytes:
    """Return the content of a ``tokenizer.json``.

    Raises:
        DataError: it cannot be read, is not a regular file, or is larger than `MOST_TOKENIZER_BYTES`.
    """
    try:
        if is_stored(path):  # beside a checkpoint of a store
            return files_of(path).read_whole(path)
        return read_regular(path, limit_bytes=MOST_TOKENIZER_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def prompt_tokens(encoder: Encoder, prompt: str, vocab_size: int) -> list[int]:
    """Return the tokens of a prompt; for an empty prompt the end-of-text token.

    Raises:
        DataError: the prompt is not Unicode, or a token is not below ``vocab_size``.
    """
    try:
        text = prompt.encode()
    except UnicodeEncodeError as error:
        raise DataError("a prompt is no Unicode text", found=str(error)) from error
    tokens = [int(token) for token in encoder.encode(Document(Path("prompt"), text))] or [encoder.end_of_text]
    if max(tokens) >= vocab_size:
        raise DataError(
            "a token of the prompt is outside the vocabulary of the model",
            expected=f"0 to {vocab_size - 1}",
            found=max(tokens),
            fix="Name the tokenizer that wrote the data.",
        )
    return tokens


def find_files(pattern: str) -> list[Path]:
    """Return the regular files matching a path or a glob (``**`` allowed), sorted, each once.

    Raises:
        DataError: there is none, or a folder cannot be listed.
    """
    expanded = Path(pattern).expanduser()
    # A name that happens to hold glob characters still names itself.
    if is_file(expanded):
        return [expanded]
    _require_listable(expanded)
    paths = sorted({Path(hit) for hit in glob.glob(str(expanded), recursive=True)})
    files = [path for path in paths if is_file(path)]
    if not files:
        entries = "a folder, pipe or device, or a dead link" if len(paths) == 1 else f"{len(paths)}, and no file"
        raise DataError(
            "no file matches",
            where=pattern,
            expected="a file, or a glob that matches files",
            found=entries if paths else "nothing",
            fix=f"Relative paths start at {Path.cwd()}; quote globs; '**/*.txt' looks into folders.",
        )
    for path in sorted({*paths}.difference(files)):
        if not is_dir(path):
            raise DataError(
                "a match is no file",
                where=path,
                expected="a file, or a folder, which is passed over",
                found="a link that leads nowhere" if is_symlink(path) else "a pipe or device",
                fix="Restore the file, or remove the match.",
            )
    if empty := [path for path in files if not path.stat().st_size]:
        _log.warning(f"{len(empty)} of {len(files)} files are empty and give nothing: {listed(empty)}")
    return files


def _require_listable(pattern: Path) -> None:
    """Raise a DataError for a folder that a glob would pass over: its files would be missing without a word."""
    for depth, part in enumerate(pattern.parts):
        if not glob.has_magic(part):
            continue
        ends = depth + 1 if part == "**" else depth
        for folder in glob.glob(os.path.join(".", *pattern.parts[:ends], ""), recursive=True):
            try:
                os.scandir(folder).close()
            except OSError as error:
                _refuse_folder(error)


def _refuse_folder(error: OSError) -> NoReturn:
    raise DataError(
        "A folder cannot be listed",
        where=error.filename,
        found=error.strerror,
        fix="Correct its permissions, or name the files without it.",
    ) from error


def text_sources(pattern: str) -> list[TextSource]:
    """Return the files matching ``pattern``, sorted by name relative to the folders before its first wildcard.

    Raises:
        DataError: no file matches, or a file cannot be read.
    """
    paths = find_files(pattern)
    fixed = Path(pattern).expanduser()
    if paths == [fixed]:
        return _sources(fixed.parent, paths)
    # Not the deepest folder in common: that one moves, and with it every name, when a file is added.
    while glob.has_magic(str(fixed)):
        fixed = fixed.parent
    return _sources(fixed, paths)


def stdlib_sources(root: Path) -> list[TextSource]:
    """Return the Python files of a standard library, without tests and installed packages, sorted by relative name.

    Args:
        root: the folder of the library, ``sysconfig.get_paths()["stdlib"]`` for the running interpreter.

    Raises:
        DataError: there is none, or a folder cannot be listed.
    """
    paths = []
    for folder, folders, names in os.walk(root, onerror=_refuse_folder):
        folders[:] = [name for name in folders if name not in _STDLIB_EXCLUDED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith(_STDLIB_EXCLUDED_PREFIXES) and is_file(path):
                paths.append(path)
    if not paths:
        raise DataError(
            "the standard library of this Python has no source files",
            where=root,
            expected="*.py files",
            found="none",
            fix="Use another interpreter, or data=text data.path=FILE_OR_GLOB.",
        )
    return _sources(root, paths)


def split_documents(
    sources: Sequence[TextSource], valid_fraction: float, *, takes_bytes: bool = False
) -> tuple[Iterable[Document], Iterable[Document]]:
    """Split into train and valid documents, read from disk lazily.

    Several files are split by file: a file is valid if the hash of its name, without the suffix of a compression, falls
    into the fraction, so it stays on its side when others are added or removed; the file nearest to the limit
    moves if a side would be empty. The last ``valid_fraction`` of a single file is valid, cut between two UTF-8
    characters, or between two rows of a Parquet file or two JSON lines, each of which is a document.

    Args:
        takes_bytes: accept files of any bytes.

    Raises:
        DataError: while reading, a file cannot be read, is no text, or was changed after it was found.
    """
    if len(sources) == 1:
        source, path = sources[0], sources[0].path
        if file_form(path) is FileForm.parquet:
            rows = row_count(path)
            first_valid = rows - round(rows * valid_fraction)
            return _rows(source, 0, first_valid), _rows(source, first_valid, rows)
        if is_json_lines(path, takes_bytes=takes_bytes):
            documents = _lines(source)
            first_valid = len(documents) - round(len(documents) * valid_fraction)
            return documents[:first_valid], documents[first_valid:]
        text = _read(source, takes_bytes=takes_bytes)
        cut = _cut(text, valid_fraction)
        return [Document(path, text[:cut])], [Document(path, text[cut:])]
    ranks = {
        source.name: xxhash.xxh3_64_intdigest(plain_name(source.name).encode("utf-8", "surrogateescape"))
        for source in sources
    }
    limit = int(valid_fraction * 2**64)
    # Between the lowest and the highest rank neither side is empty.
    limit = min(max(limit, min(ranks.values()) + 1), max(ranks.values()))
    train = [source for source in sources if ranks[source.name] >= limit]
    valid = [source for source in sources if ranks[source.name] < limit]
    return _documents(train, takes_bytes=takes_bytes), _documents(valid, takes_bytes=takes_bytes)


def token_chunks(documents: Iterable[Document], encoder: Encoder) -> Iterator[TokenArray]:
    """Encode documents lazily, each followed by the end-of-text token.

    Raises:
        DataError: a document cannot be read or encoded.
    """
    end = np.array([encoder.end_of_text], dtype=np.uint32)
    for document in documents:
        yield encoder.encode(document)
        yield end


def _sources(root: Path, paths: Iterable[Path]) -> list[TextSource]:
    sources = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        name = path.relative_to(root).as_posix()
        sources.append(TextSource(path=path, name=name, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns))
    return sorted(sources, key=lambda source: source.name)


def _documents(sources: Iterable[TextSource], *, takes_bytes: bool) -> Iterator[Document]:
    for source in sources:
        if file_form(source.path) is FileForm.parquet:
            yield from _rows(source, 0, None)
        elif is_json_lines(source.path, takes_bytes=takes_bytes):
            yield from _lines(source)
        else:
            yield Document(source.path, _read(source, takes_bytes=takes_bytes))


def _rows(source: TextSource, first: int, end: int | None) -> Iterator[Document]:
    """Yield rows of a Parquet file as documents."""
    with source.path.open("rb") as file:
        for text in islice(column_texts(file, source.path, DOCUMENT_KEY), first, end):
            yield Document(source.path, text.encode())
    _check_unchanged(source)


def _lines(source: TextSource) -> list[Document]:
    """Return the documents of a file of JSON lines."""
    block = TextBlock(source.path, 0, 1, _read(source, takes_bytes=True), ends_text=True)
    return [Document(source.path, text) for text in texts(block, SplitRule(TextForm.jsonl, DOCUMENT_KEY))]


def _read(source: TextSource, *, takes_bytes: bool) -> bytes:
    with open_text(Span(source.path), takes_bytes=takes_bytes) as reader:
        text = reader.read_all()
    _check_unchanged(source)
    return text


def _check_unchanged(source: TextSource) -> None:
    """Refuse a file with another size or time than it was found with, by which the cache is named."""
    try:
        status = source.path.stat()
    except OSError as error:
        raise unreadable(source.path, error) from error
    if (status.st_size, status.st_mtime_ns) != (source.size_bytes, source.mtime_ns):
        raise DataError(
            "a text file changed while it was being read",
            where=source.path,
            expected=f"{source.size_bytes} bytes",
            found=f"{status.st_size} bytes, or another time of change",
            fix="Start again when no other program writes to it.",
        )


def _cut(text: bytes, valid_fraction: float) -> int:
    cut = len(text) - round(len(text) * valid_fraction)
    # RFC 3629: bytes 10xxxxxx continue a character, at most three of them.
    for _ in range(3):
        if cut < len(text) and text[cut] & 0xC0 == 0x80:
            cut += 1
    return cut


def as_characters(document: Document) -> str:
    """Return a document as characters.

    Raises:
        DataError: it is not UTF-8; names file and byte.
    """
    try:
        return document.text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(document.path, document.offset, error) from error
