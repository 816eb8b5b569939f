"""Divides files into the two sides of a split, and reads a side in blocks: complete lines, or parts of a text.

A block depends only on its file and the tokenizer, so its tokens do not depend on how many processes encode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import xxhash

from reprise.errors import DataError
from trainer.data.cuts import ANYWHERE, LINES, Cuts
from trainer.data.json_lines import is_json_lines
from trainer.data.sources import TextSource
from trainer.data.text_file import PARQUET, not_utf8, open_text, plain_name

BLOCK_BYTES = 256 << 10
# Lines are parsed whole, and texts encoded whole up to a cut. A few compressed bytes may expand to gigabytes.
MOST_BLOCK_BYTES = 256 << 20
_HASHES = 2**64
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
        form: Form of all files except Parquet. None detects each file's form.
        key: Key for the text in a JSON object, and Parquet column.
        takes_bytes: Accept files that are not text, as bytes.
        valid_fraction: Held-out share. 0 holds out nothing.
        block_bytes: Approximate block size.
    """

    form: TextForm | None = None
    key: str = "text"
    takes_bytes: bool = False
    valid_fraction: float = 0.0
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class TextPart:
    """A file's part on a side of the split.

    Args:
        start: First byte in a text.
        stop: End byte in a text. None means the text's end.
        share: Only documents with a hash in `[lo, hi)` belong to the part.
    """

    source: TextSource
    form: TextForm
    options: SplitOptions
    start: int = 0
    stop: int | None = None
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
    parts = [_part(source, options) for source in sources]
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


def _part(source: TextSource, options: SplitOptions) -> TextPart:
    with open_text(source.path, takes_bytes=True) as text:
        form = TextForm.jsonl if text.form == PARQUET else options.form
    if form is None:
        is_lines = is_json_lines(source.path, options.key, takes_bytes=options.takes_bytes)
        form = TextForm.jsonl if is_lines else TextForm.text
    return TextPart(source, form, options)


def _rank(name: str) -> int:
    return xxhash.xxh3_64_intdigest(plain_name(name).encode("utf-8", "surrogateescape"))


def _cut(part: TextPart) -> int:
    """Return where a single text's held-out end starts, between two characters. A compressed text is read twice."""
    options, path, size = part.options, part.source.path, part.source.size_bytes
    with open_text(path, takes_bytes=options.takes_bytes) as text:
        start = text.at
        if text.form:
            while text.read(options.block_bytes):
                pass
            size = text.at
    cut = size - round((size - start) * options.valid_fraction)
    with open_text(path, start=cut, takes_bytes=options.takes_bytes) as text:
        following = text.read(3)
    return cut + len(following) - len(following.lstrip(_CONTINUATION))


def read_blocks(part: TextPart, cuts: Cuts) -> Iterator[TextBlock]:
    """Yield a part's blocks, about `block_bytes` each. A JSON line is never cut.

    Args:
        cuts: Where the tokenizer allows cuts in a text.

    Raises:
        DataError: The file cannot be read, is not text, or has changed; or a line, or an uncuttable text, is too long.
    """
    options, path, waiting, line, ends = part.options, part.source.path, bytearray(), 1, False
    if part.form is TextForm.jsonl:
        cuts = LINES
    elif options.takes_bytes:
        cuts = ANYWHERE
    with open_text(path, start=part.start, key=options.key, takes_bytes=options.takes_bytes) as text:
        offset = text.at
        while not ends:
            most = options.block_bytes if part.stop is None else part.stop - text.at
            data = text.read(min(options.block_bytes, most))
            waiting += data
            ends = text.at == part.stop or not text.has_more()
            # New bytes may allow a cut behind the last byte read before.
            cut = len(waiting) if ends else cuts.last(waiting, max(0, len(waiting) - len(data) - 1))
            if cut or ends:
                yield TextBlock(part, offset, line, bytes(waiting[:cut]), ends_text=ends)
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
    part = block.part
    if part.form is TextForm.text:
        try:
            return [block.data.decode(errors="surrogateescape" if part.options.takes_bytes else "strict")]
        except UnicodeDecodeError as error:
            raise not_utf8(part.source.path, block.offset, error) from error
    lines = enumerate(block.data.split(b"\n"), start=block.line)
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
