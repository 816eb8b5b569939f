"""Reads large files of text or JSON lines in blocks of complete lines or parts of a document, and finds documents in
them.

A block depends on its file and the tokenizer alone, so its tokens do not depend on the number of processes that encode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import xxhash

from reprise.errors import DataError
from trainer.data.cuts import LINES, Cuts
from trainer.data.text_file import Span, open_text

BLOCK_BYTES = 256 << 10
# A line is parsed whole, and a text encoded whole up to a cut. Some bytes of a compressed file may be gigabytes of it.
MOST_BLOCK_BYTES = 256 << 20
HASHES = 2**64


class TextForm(Enum):
    """The form of a file: a text, or a JSON object with a text on every line."""

    text = "text"
    jsonl = "jsonl"


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Bytes of a file's text: complete lines of JSON from number `line` on, or a part of it from byte `offset` on."""

    path: Path
    offset: int
    line: int
    data: bytes
    ends_text: bool


@dataclass(frozen=True, slots=True)
class SplitRule:
    """The rule to find documents in blocks.

    Args:
        key: key of the text in a JSON object.
        share: take only documents from JSON lines whose hash, out of `HASHES`, lies in `[lo, hi)`.
    """

    form: TextForm
    key: str = "text"
    share: tuple[int, int] = (0, HASHES)


def read_blocks(
    span: Span,
    form: TextForm,
    cuts: Cuts,
    *,
    key: str = "text",
    takes_bytes: bool = False,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[TextBlock]:
    """Yield the blocks of a file, about `block_bytes` each; a line of JSON is never cut.

    Args:
        cuts: where a text may be cut for its tokenizer.
        key: the column of a Parquet file.
        takes_bytes: accept a file of any bytes.

    Raises:
        DataError: the file cannot be read, is no text, or became shorter meanwhile; a line, or a text that must not be
            cut, is too long.
    """
    waiting, offset, line = bytearray(), span.lo, 1
    is_text = form is TextForm.text
    cuts = cuts if is_text else LINES
    with open_text(span, key=key, takes_bytes=takes_bytes, checks_utf8=is_text) as reader:
        while reader.has_more():
            read = reader.read(block_bytes)
            waiting += read
            is_last = not reader.has_more()
            # What follows the last byte that was read before may make a cut behind that byte.
            cut = len(waiting) if is_last else cuts.last(waiting, max(0, len(waiting) - len(read) - 1))
            if cut:
                data = bytes(waiting[:cut])
                del waiting[:cut]
                yield TextBlock(span.path, offset, line, data, ends_text=is_last)
                offset += cut
                line += data.count(b"\n")
            elif len(waiting) > MOST_BLOCK_BYTES:
                raise _too_long(span.path, line, cuts if is_text else None)


def texts(block: TextBlock, rule: SplitRule) -> list[bytes]:
    """Return the texts of a block in UTF-8: the documents of its lines, or its part of a document.

    Raises:
        DataError: a line is not a JSON object with a text under the rule's key; names file and line.
    """
    if rule.form is TextForm.text:
        return [block.data]
    lines = enumerate(block.data.split(b"\n"), start=block.line)
    candidates = (
        _text_of(line, rule.key, where=f"{block.path}, line {number}") for number, line in lines if line.strip()
    )
    lo, hi = rule.share
    return [text for text in candidates if lo <= xxhash.xxh3_64_intdigest(text) < hi]


def _too_long(path: Path, line: int, cuts: Cuts | None) -> DataError:
    """Return the error of a line, or for `cuts` of a text without a place to cut it."""
    most = f"at most {MOST_BLOCK_BYTES} bytes"
    if cuts is None:
        fix = "Split the document, or read the file as one text with --form text."
        return DataError("a line is too long", where=f"{path}, line {line}", expected=most, found="more", fix=fix)
    place = "the next letter or digit before white space"
    if cuts.obstacle:
        place = f"its end, since the tokenizer's {cuts.obstacle} allows no cut"
    return DataError(
        "a text is too long to be encoded whole",
        where=path,
        expected=f"{most} up to {place}",
        found="more",
        fix="Write its documents as JSON lines, or choose another tokenizer.",
    )


def start_of_character(text: bytes | bytearray, at: int) -> int:
    """Return `at`, or the start of the character split by `at`; in bytes other than UTF-8, `at`."""
    # RFC 3629: bytes 10xxxxxx continue a character, at most three of them; the first tells how many follow it.
    for back in range(1, min(4, at) + 1):
        byte = text[at - back]
        if byte & 0xC0 != 0x80:
            size = 2 if byte >> 5 == 6 else 3 if byte >> 4 == 14 else 4 if byte >> 3 == 30 else 1
            return at - back if size > back else at
    return at


def _text_of(line: bytes, key: str, *, where: str) -> bytes:
    try:
        parsed = json.loads(line)
        problem = "no JSON object" if not isinstance(parsed, dict) else None
    except (ValueError, RecursionError) as error:
        parsed, problem = {}, f"no JSON: {error}"
    if problem is None and not isinstance(text := parsed.get(key), str):
        problem = f"{type(text).__name__} under {key!r}" if key in parsed else f"only the keys {sorted(parsed)}"
    if problem is None:
        try:
            return str(text).encode()
        except UnicodeEncodeError as error:
            problem = f"a surrogate without its other half: {error}"
    raise DataError(
        "a line holds no document",
        where=where,
        expected=f"a JSON object with a text under {key!r}",
        found=problem,
        fix="Mend the line, or name the text's key: reprise prepare-data --key KEY.",
    )
