"""Divides files into the two sides of a split, and reads a side in blocks: complete lines, or parts of a text.

A block depends only on its file and the tokenizer, so its tokens do not depend on how many processes encode.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from reprise.errors import DataError, count_of
from trainer.data.cuts import ANYWHERE, LINES, Cuts
from trainer.data.sources import TextSource
from trainer.data.text_file import PARQUET, not_utf8, packing, plain_name, read_plain, read_text
from trainer.data.token_file import MAGICS

# Lines are parsed whole, and texts encoded whole up to a cut. A few compressed bytes may expand to gigabytes.
MOST_BLOCK_BYTES = 256 << 20
_MOST_FIRST_LINE = 64 << 20
_HASHES = 2**64
_JSON_LINES = (".jsonl", ".ndjson")
_OBJECT = re.compile(rb"(\xef\xbb\xbf)?\s*\{")
# RFC 3629: at most three such bytes continue a character.
_CONTINUATION = bytes(range(0x80, 0xC0))


class TextForm(Enum):
    """A file's form: text, a JSON object with a text per line or Parquet row, or bare tokens, as in nanoGPT's files."""

    text = "text"
    jsonl = "jsonl"
    uint16 = "uint16"
    uint32 = "uint32"


DTYPES: Mapping[TextForm | None, np.dtype[Any]] = {TextForm.uint16: np.dtype("<u2"), TextForm.uint32: np.dtype("<u4")}


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options for reading and splitting texts.

    Args:
        form: Form of all files. None detects each file's form. Parquet stays Parquet, unless files are token arrays.
        key: Key for the text in a JSON object, and Parquet column.
        takes_bytes: Accept files that are not text, as bytes.
        valid_fraction: Held-out share. 0 holds out nothing.
    """

    form: TextForm | None = None
    key: str = "text"
    takes_bytes: bool = False
    valid_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class TextPart:
    """A file's part on a side of the split.

    Args:
        start: First byte in a text.
        stop: End byte in a text.
        share: Only documents with a hash in `[lo, hi)` belong to the part.
    """

    source: TextSource
    form: TextForm
    options: SplitOptions
    start: int = 0
    stop: int = sys.maxsize
    share: tuple[int, int] = (0, _HASHES)


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Bytes from a file's text: complete JSON lines from line number `line` on, or a text part from byte `offset`."""

    part: TextPart
    offset: int
    line: int
    data: bytes
    ends_text: bool


def split(sources: Sequence[TextSource], options: SplitOptions) -> dict[str, list[TextPart]]:
    """Return each side's parts, training data first. Without `valid_fraction` there is only that side.

    JSON lines are split by a hash over their text, so equal texts are on the same side. Several texts are split by
    file: a file is held out if the hash of its name, without a compression suffix, falls into the fraction. So it stays
    on its side when others are added or removed. If a side would be empty, the file nearest to the limit moves. For a
    single text, the last ``valid_fraction`` is held out, cut between two characters.

    Raises:
        DataError: A file cannot be read, or is not text.
    """
    parts = [part_of(source, options) for source in sources]
    limit = int(options.valid_fraction * _HASHES)
    if not options.valid_fraction:
        return {"train": parts}
    texts = [part for part in parts if part.form is TextForm.text]
    ranks = [_rank(part.source.name) for part in texts]
    # Between the lowest and the highest rank, neither side is empty.
    highest = min(max(limit, min(ranks) + 1), max(ranks)) if ranks else 0
    train, valid = list[TextPart](), list[TextPart]()
    for part in parts:
        if part.form is TextForm.jsonl:
            train.append(replace(part, share=(limit, _HASHES)))
            valid.append(replace(part, share=(0, limit)))
        elif len(texts) == 1:
            cut = _cut(part)
            train.append(replace(part, stop=cut))
            valid.append(replace(part, start=cut))
        else:
            (train if _rank(part.source.name) >= highest else valid).append(part)
    return {"train": train, "valid": valid}


def part_of(source: TextSource, options: SplitOptions) -> TextPart:
    """Return a complete file.

    Raises:
        DataError: The file cannot be read, is not text, or is not a token array.
    """
    form = options.form
    if form in DTYPES:
        _check_array(source, DTYPES[form].itemsize)
    elif packing(source.path) == PARQUET:
        form = TextForm.jsonl
    if form is None:
        is_lines = is_json_lines(source.path, options.key, takes_bytes=options.takes_bytes)
        form = TextForm.jsonl if is_lines else TextForm.text
    return TextPart(source, form, options)


def _check_array(source: TextSource, token_bytes: int) -> None:
    """Refuse a file that cannot be a token array. Without a header, truncation goes unnoticed."""
    has_header = next(read_plain(source.path), b"").startswith((b"\x93NUMPY", *MAGICS))
    if has_header or not source.size_bytes or source.size_bytes % token_bytes:
        raise DataError(
            "The file is not a token array",
            where=source.path,
            expected=f"{token_bytes} bytes per token from the first byte, and at least one token",
            found="the header of a NumPy file or a token file" if has_header else count_of(source.size_bytes, "byte"),
            fix="Convert a NumPy file with numpy.load(PATH).tofile(OTHER). Train on a token file with data=token_file.",
        )


def is_json_lines(path: Path, key: str = "text", *, takes_bytes: bool = False) -> bool:
    """Return whether a file has a document per line, by its name or its first line: an object with text under `key`.

    Any other JSON, such as a `package.json` among sources, is a text.

    Raises:
        DataError: The file cannot be read, or is not text.
    """
    if plain_name(path.name).endswith(_JSON_LINES):
        return True
    head = bytearray()
    for piece in read_text(path, takes_bytes=takes_bytes):
        head += piece
        if b"\n" in piece or not _OBJECT.match(head) or len(head) >= _MOST_FIRST_LINE:
            break
    try:
        first = json.loads(head.partition(b"\n")[0])
        return isinstance(first, dict) and isinstance(first.get(key), str)
    except (ValueError, RecursionError):
        return False


def _rank(name: str) -> int:
    return xxhash.xxh3_64_intdigest(plain_name(name).encode("utf-8", "surrogateescape"))


def _cut(part: TextPart) -> int:
    """Return where a single text's held-out end starts, between two characters. A compressed text is read twice."""
    options, path, size = part.options, part.source.path, part.source.size_bytes
    pieces = read_text(path, takes_bytes=options.takes_bytes)
    first = next(pieces, b"")
    if packing(path):
        size = len(first) + sum(map(len, pieces))
    cut = size - round((size - _mark_bytes(first, options)) * options.valid_fraction)
    following = next(read_text(path, start=cut, stop=cut + 3, takes_bytes=options.takes_bytes), b"")
    return cut + len(following) - len(following.lstrip(_CONTINUATION))


def _mark_bytes(start: bytes, options: SplitOptions) -> int:
    """Return the size of the byte-order mark at a text's start. Where any bytes are accepted, it is text."""
    return 0 if options.takes_bytes or not start.startswith(codecs.BOM_UTF8) else len(codecs.BOM_UTF8)


def read_blocks(parts: Iterable[TextPart], cuts: Cuts) -> Iterator[TextBlock]:
    """Yield the parts' blocks, about `BLOCK_BYTES` each. A JSON line is never cut.

    Args:
        cuts: Where the tokenizer allows cuts in a text.

    Raises:
        DataError: The file cannot be read, is not text, or has changed; or a line, or an uncuttable text, is too long.
    """
    for part in parts:
        yield from _read_part(part, cuts)


def _read_part(part: TextPart, cuts: Cuts) -> Iterator[TextBlock]:
    options, path, waiting, line, offset = part.options, part.source.path, bytearray(), 1, part.start
    pieces = read_text(path, start=offset, stop=part.stop, key=options.key, takes_bytes=options.takes_bytes)
    if part.form in DTYPES:
        cuts, pieces = ANYWHERE, read_plain(path)
    elif part.form is TextForm.jsonl:
        cuts = LINES
    elif options.takes_bytes:
        cuts = ANYWHERE
    for piece, following in itertools.pairwise(itertools.chain([b""], pieces, [b""])):
        searched = max(0, len(waiting) - 1)  # new bytes may allow a cut behind the last byte read before
        waiting += piece
        cut = cuts.last(waiting, searched) if following else len(waiting)
        if cut or not following:
            yield TextBlock(part, offset, line, bytes(waiting[:cut]), ends_text=not following)
            offset += cut
            line += waiting.count(b"\n", 0, cut)
            del waiting[:cut]
        elif len(waiting) > MOST_BLOCK_BYTES:
            raise _too_long(part, line, cuts)
    part.source.check_unchanged()


def texts(block: TextBlock) -> list[str]:
    """Return a block's texts: its lines' documents, or its part of a text.

    With `takes_bytes`, undecodable bytes in a text become lone surrogates, as in file names.

    Raises:
        DataError: A byte is not UTF-8, or a line is not a JSON object with a text. The message names file and byte or
            line.
    """
    part, mark = block.part, 0 if block.offset else _mark_bytes(block.data, block.part.options)
    data = block.data[mark:]
    if part.form is TextForm.text:
        try:
            return [data.decode(errors="surrogateescape" if part.options.takes_bytes else "strict")]
        except UnicodeDecodeError as error:
            raise not_utf8(part.source.path, block.offset + mark, error) from error
    lines = enumerate(data.split(b"\n"), start=block.line)
    documents = (_document(part, number, line) for number, line in lines if line.strip())
    lo, hi = part.share
    return [text for text, digest in documents if lo <= digest < hi]


def _too_long(part: TextPart, line: int, cuts: Cuts) -> DataError:
    """Return the error for a line, or a text without a cut."""
    place = "the next letter or digit before white space, or the end of the line"
    if cuts.obstacle:
        place = f"its end, since the tokenizer's {cuts.obstacle} does not allow a split"
    return DataError(
        "A document is too long to encode in one piece",
        where=f"{part.source.path}, line {line}",
        expected=f"at most {MOST_BLOCK_BYTES} bytes before {place}",
        found="more",
        fix="Split it into JSON lines, read JSON lines as one text with --form text, or choose another tokenizer.",
    )


def _document(part: TextPart, number: int, line: bytes) -> tuple[str, int]:
    """Return a line's text and its hash."""
    key, value = part.options.key, None
    try:
        value = json.loads(line)
        text = value[key]
        return text, xxhash.xxh3_64_intdigest(text.encode())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "A line is not a document",
            where=f"{part.source.path}, line {number}",
            expected=f"a JSON object with text under {key!r}",
            found=f"the keys {[*value]}" if isinstance(value, dict) and key not in value else f"{error!r:.99}",
            fix="Fix the line, or set the key of the text: reprise prepare-data --key KEY.",
        ) from error
