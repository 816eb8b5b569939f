"""Divides files into the two sides of a split, and reads a side in blocks: complete lines, or parts of a text.

A block depends only on its file and the tokenizer, so its tokens do not depend on how many processes encode.
"""

from __future__ import annotations

import codecs
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import xxhash

from reprise.errors import DataError
from trainer.data import text_file
from trainer.data.cuts import CHARACTERS, LINES, Cuts
from trainer.data.sources import TextSource
from trainer.data.text_file import PARQUET, packing, plain_name, read_text

_HASHES = 2**64
_JSON_LINES = (".json", ".jsonl", ".ndjson")
_HEAD_BYTES = 8 << 10  # a file with a NUL in them is not text
# RFC 3629: at most three such bytes continue a character.
_CONTINUATION = bytes(range(0x80, 0xC0))


class TextForm(Enum):
    """A file's form: text, or a JSON object with a text per line or Parquet row."""

    text = "text"
    jsonl = "jsonl"


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options for reading and splitting texts.

    Args:
        form: Form of all files except Parquet. None takes each file's form from its name.
        key: Key for the text in a JSON object, and Parquet column.
        valid_fraction: Held-out share. 0 holds out nothing.
    """

    form: TextForm | None = None
    key: str = "text"
    valid_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class TextPart:
    """A file's part on a side of the split.

    Args:
        key: Key for the text in a JSON object, and Parquet column.
        start: First byte in a text.
        stop: End byte in a text.
        share: Only documents with a hash in `[lo, hi)` belong to the part.
    """

    source: TextSource
    form: TextForm
    key: str
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
        DataError: A file cannot be read, or does not start as a text.
    """
    parts = [_part_of(source, options) for source in sources]
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
            cut = _cut(part, options.valid_fraction)
            train.append(replace(part, stop=cut))
            valid.append(replace(part, start=cut))
        else:
            (train if _rank(part.source.name) >= highest else valid).append(part)
    return {"train": train, "valid": valid}


def _part_of(source: TextSource, options: SplitOptions) -> TextPart:
    """Return a whole file. Its start is checked, so that a file that is not text fails before others are encoded."""
    if packing(source.path) == PARQUET:
        return TextPart(source, TextForm.jsonl, options.key)
    is_lines = plain_name(source.name).endswith(_JSON_LINES)
    part = TextPart(source, options.form or (TextForm.jsonl if is_lines else TextForm.text), options.key)
    head = b"".join(read_text(source.path, stop=_HEAD_BYTES))
    if (zero := head.find(0)) >= 0:
        raise _not_text(part, zero, "a NUL byte")
    if part.form is TextForm.text:
        texts(TextBlock(part, 0, 1, head[: CHARACTERS.last(head)], ends_text=False))
    return part


def _rank(name: str) -> int:
    return xxhash.xxh3_64_intdigest(plain_name(name).encode("utf-8", "surrogateescape"))


def _cut(part: TextPart, fraction: float) -> int:
    """Return where a single text's held-out end starts, between two characters. A compressed text is read twice."""
    path, size = part.source.path, part.source.size_bytes
    if packing(path):
        size = sum(map(len, read_text(path)))
    mark = b"".join(read_text(path, stop=len(codecs.BOM_UTF8)))
    cut = size - round((size - len(mark) * (mark == codecs.BOM_UTF8)) * fraction)
    following = b"".join(read_text(path, start=cut, stop=cut + 3))
    return cut + len(following) - len(following.lstrip(_CONTINUATION))


def read_blocks(parts: Iterable[TextPart], cuts: Cuts) -> Iterator[TextBlock]:
    """Yield the parts' blocks, about `BLOCK_BYTES` each. A JSON line, or a text without a cut, is a single block.

    Args:
        cuts: Where the tokenizer allows cuts in a text.

    Raises:
        DataError: The file cannot be read, or has changed.
    """
    for part in parts:
        allowed = LINES if part.form is TextForm.jsonl else cuts
        waiting, least, line, offset = bytearray(), text_file.BLOCK_BYTES, 1, part.start
        pieces = read_text(part.source.path, start=part.start, stop=part.stop, key=part.key)
        for piece in itertools.chain(pieces, [b""]):  # no more bytes: the text has ended
            waiting += piece
            if piece and len(waiting) < least:
                continue
            cut = allowed.last(waiting) if piece else len(waiting)
            least = text_file.BLOCK_BYTES if cut else 2 * len(waiting)  # a search takes time
            if cut or not piece:
                yield TextBlock(part, offset, line, bytes(waiting[:cut]), ends_text=not piece)
                offset += cut
                line += waiting.count(b"\n", 0, cut)
                del waiting[:cut]
        part.source.check_unchanged()


def texts(block: TextBlock) -> list[str]:
    """Return a block's texts: its lines' documents, or its part of a text.

    Raises:
        DataError: A text is not UTF-8, or a line is not a JSON object with a text. The message names file and byte or
            line.
    """
    part, data = block.part, block.data if block.offset else block.data.removeprefix(codecs.BOM_UTF8)
    if part.form is TextForm.text:
        start = block.offset + len(block.data) - len(data)
        try:
            return [data.decode()]
        except UnicodeDecodeError as error:
            raise _not_text(part, start + error.start, f"byte 0x{data[error.start]:02x} ({error.reason})") from error
    lines = enumerate(data.split(b"\n"), start=block.line)
    documents = (_document(part, number, line) for number, line in lines if line.strip())
    lo, hi = part.share
    return [text for text, digest in documents if lo <= digest < hi]


def _not_text(part: TextPart, at: int, problem: str) -> DataError:
    return DataError(
        "The file is not text",
        where=f"{part.source.path}, byte {at}",
        expected="text in UTF-8, plain, in gzip, Zstandard or Parquet",
        found=problem,
        fix="Convert it (iconv -f UTF-16 -t UTF-8 FILE), decompress it, or leave it out. For token arrays, use "
        "`reprise prepare-data --raw`.",
    )


def _document(part: TextPart, number: int, line: bytes) -> tuple[str, int]:
    """Return a line's text and its hash."""
    key, value = part.key, None
    try:
        value = json.loads(line)
        text = value[key]
        return text, xxhash.xxh3_64_intdigest(text.encode())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "A line or row is not a document",
            where=f"{part.source.path}, line {number}",
            expected=f"a text under the key, or in the column, {key!r}",
            found=f"the keys {[*value]}" if isinstance(value, dict) and key not in value else f"{error!r:.99}",
            fix="Fix it, or set the text's key: reprise prepare-data --key KEY. --form text reads any JSON.",
        ) from error
