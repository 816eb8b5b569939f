"""Reads large files of text or JSON lines in blocks of complete lines or parts of a document, and finds documents in
them.

A block depends on its file alone, so its tokens do not depend on the number of processes that encode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import xxhash

from reprise.errors import DataError
from trainer.data.text_file import Span, open_text

BLOCK_BYTES = 256 << 10
# A line is parsed whole. Some bytes of a compressed file may be gigabytes without an end of line.
MOST_LINE_BYTES = 256 << 20
HASHES = 2**64

# Tokenizers that split at white space first never make one token of what lies on both sides of such a place, be it
# GPT-2's pattern or LLaMA-3's, which leaves white space behind a sign with the sign.
_SEAM = re.compile(rb"[A-Za-z0-9](?=[ \t\r\n])")


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
    span: Span, form: TextForm, *, key: str = "text", takes_bytes: bool = False, block_bytes: int = BLOCK_BYTES
) -> Iterator[TextBlock]:
    """Yield the blocks of a file, about `block_bytes` each; a line of JSON is never cut.

    Args:
        key: the column of a Parquet file.
        takes_bytes: accept a file of any bytes.

    Raises:
        DataError: the file cannot be read, is no text, or became shorter meanwhile; a line is too long.
    """
    waiting, offset, line = bytearray(), span.lo, 1
    is_text = form is TextForm.text
    with open_text(span, key=key, takes_bytes=takes_bytes, checks_utf8=is_text) as reader:
        while reader.has_more():
            read = reader.read(block_bytes)
            waiting += read
            is_last = not reader.has_more()
            cut = len(waiting) if is_last else _cut(waiting, form, searched=len(waiting) - len(read))
            if cut:
                data = bytes(waiting[:cut])
                del waiting[:cut]
                yield TextBlock(span.path, offset, line, data, ends_text=is_last)
                offset += cut
                line += data.count(b"\n")
            elif len(waiting) > MOST_LINE_BYTES:
                raise DataError(
                    "a line is too long",
                    where=f"{span.path}, line {line}",
                    expected=f"at most {MOST_LINE_BYTES} bytes",
                    found="more",
                    fix="Split the document, or read the file as one text with --form text.",
                )


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


def _cut(waiting: bytearray, form: TextForm, *, searched: int) -> int:
    """Return the number of bytes for a block before the last of its file; 0 to read more."""
    if form is TextForm.jsonl:
        return waiting.rfind(b"\n", searched) + 1
    last = None
    for seam in _SEAM.finditer(waiting, max(0, len(waiting) - (64 << 10))):
        last = seam
    if last is not None:
        return last.end()
    return start_of_character(waiting, len(waiting))


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
