"""Divides files into the two sides of a split, and reads a side in blocks: complete lines, or parts of a text or array.

A block depends on its file and the tokenizer alone, so its tokens do not depend on the number of processes that encode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import xxhash

from reprise.errors import DataError, count_of
from trainer.data.cuts import ANYWHERE, LINES, Cuts
from trainer.data.json_lines import is_json_lines
from trainer.data.sources import TextSource
from trainer.data.text_file import PARQUET, not_utf8, open_text, plain_name
from trainer.data.token_file import MAGICS

BLOCK_BYTES = 256 << 10
# A line is parsed whole, and a text encoded whole up to a cut. Some bytes of a compressed file may be gigabytes of it.
MOST_BLOCK_BYTES = 256 << 20
_HASHES = 2**64
# RFC 3629: they continue a character, at most three of them.
_CONTINUATION = bytes(range(0x80, 0xC0))


class TextForm(Enum):
    """The form of a file: a text, a JSON object with a text on every line, or in every row of Parquet, or tokens.

    Tokens are little-endian arrays without a header, such as nanoGPT's `train.bin`. A run does not read them directly:
    without a header their dtype is unknown, and truncation goes unnoticed.
    """

    text = "text"
    jsonl = "jsonl"
    uint16 = "uint16"
    uint32 = "uint32"


RAW_FORMS = (TextForm.uint16, TextForm.uint32)
_NUMPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options of reading and splitting texts.

    Args:
        form: form of all files but Parquet; None takes what each shows.
        key: key of the text in a JSON object, and the column of a Parquet file.
        takes_bytes: accept files that are not text, as bytes.
        valid_fraction: share that is held out; 0 holds out none.
        held_out: arrays of tokens for validation.
        block_bytes: size of a block, about.
    """

    form: TextForm | None = None
    key: str = "text"
    takes_bytes: bool = False
    valid_fraction: float = 0.0
    held_out: Sequence[TextSource] = ()
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class TextPart:
    """What a side of a split has of a file.

    Args:
        size_bytes: of the text; None where the file is compressed.
        start, stop: bytes of a text, up to its end if `stop` is None.
        share: take only documents whose hash lies in `[lo, hi)`.
    """

    source: TextSource
    form: TextForm
    options: SplitOptions
    size_bytes: int | None
    start: int = 0
    stop: int | None = None
    share: tuple[int, int] = (0, _HASHES)


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Bytes of a file's text: complete lines of JSON from number `line` on, or a part of it from byte `offset` on."""

    part: TextPart
    offset: int
    line: int
    data: bytes
    ends_text: bool


def split(sources: Sequence[TextSource], options: SplitOptions) -> dict[str, list[TextPart]]:
    """Return the parts of each side, training data first; without `valid_fraction` there is no other side.

    JSON lines are split by the hash of their text, so equal texts are on the same side. Several texts are split by
    file: a file is valid if the hash of its name, without the suffix of a compression, falls into the fraction, so it
    stays on its side when others are added or removed; the file nearest to the limit moves if a side would be empty.
    The last ``valid_fraction`` of a single text is valid, cut between two characters.

    Raises:
        DataError: a file cannot be read, or is no text.
    """
    if options.form in RAW_FORMS:
        sides = {"train": sources, "valid": options.held_out}
        return {name: [_array(source, options) for source in members] for name, members in sides.items() if members}
    parts = [_part(source, options) for source in sources]
    limit = int(options.valid_fraction * _HASHES)
    if not options.valid_fraction:
        return {"train": parts}
    texts = [part for part in parts if part.form is TextForm.text]
    ranks = [_rank(part.source.name) for part in texts]
    # Between the lowest and the highest rank neither side is empty.
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
        size = None if text.form else source.size_bytes
    if form is None:
        is_lines = is_json_lines(source.path, options.key, takes_bytes=options.takes_bytes)
        form = TextForm.jsonl if is_lines else TextForm.text
    return TextPart(source, form, options, size)


def _array(source: TextSource, options: SplitOptions) -> TextPart:
    """Return an array of tokens; refuse one with the header of a known format."""
    assert options.form is not None
    with source.path.open("rb") as file:
        head = file.read(8)
    token_bytes, problem = np.dtype(options.form.value).itemsize, ""
    if not source.size_bytes or source.size_bytes % token_bytes:
        problem = count_of(source.size_bytes, "byte")
    elif head.startswith(_NUMPY_MAGIC):
        problem = "a NumPy array: write it again by numpy.load(PATH).tofile(OTHER)"
    elif head.startswith(MAGICS):
        problem = f"a token file: train on it with data=token_file data.train={source.path}"
    if problem:
        raise DataError(
            "A file is no array of tokens",
            where=source.path,
            expected=f"a file of {token_bytes} bytes a token, at least one, from the first byte on",
            found=problem,
        )
    return TextPart(source, options.form, options, source.size_bytes)


def _rank(name: str) -> int:
    return xxhash.xxh3_64_intdigest(plain_name(name).encode("utf-8", "surrogateescape"))


def _cut(part: TextPart) -> int:
    """Return the start of the held-out end of a single text, between two characters; compressed, it is read twice."""
    options, path = part.options, part.source.path
    with open_text(path, takes_bytes=options.takes_bytes) as text:
        start, size = text.at, part.size_bytes
        if size is None:
            while text.read(options.block_bytes):
                pass
            size = text.at
    cut = size - round((size - start) * options.valid_fraction)
    with open_text(path, start=cut, takes_bytes=options.takes_bytes) as text:
        following = text.read(3)
    return cut + len(following) - len(following.lstrip(_CONTINUATION))


def read_blocks(part: TextPart, cuts: Cuts) -> Iterator[TextBlock]:
    """Yield the blocks of a part, about `block_bytes` each; a line of JSON is never cut.

    Args:
        cuts: where a text may be cut for its tokenizer.

    Raises:
        DataError: the file cannot be read, is no text, or has changed; a line, or a text that must not be cut, is too
            long.
    """
    options, path, waiting, line, ends = part.options, part.source.path, bytearray(), 1, False
    if part.form is not TextForm.text:
        cuts = LINES if part.form is TextForm.jsonl else ANYWHERE
    elif options.takes_bytes:
        cuts = ANYWHERE
    is_raw = part.form in RAW_FORMS
    with open_text(path, start=part.start, key=options.key, takes_bytes=options.takes_bytes, is_raw=is_raw) as text:
        offset = text.at
        while not ends:
            most = options.block_bytes if part.stop is None else part.stop - text.at
            data = text.read(min(options.block_bytes, most))
            waiting += data
            ends = text.at == part.stop or not text.has_more()
            # What follows the last byte that was read before may make a cut behind that byte.
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
    """Return the texts of a block: the documents of its lines, or its part of a text.

    Bytes of a file that is not text become lone surrogates, as in file names.

    Raises:
        DataError: naming the file and the byte that is not UTF-8, or the line that is no JSON object with a text.
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
    """Return the error of a line, or of a text without a place to cut it."""
    place = "the next letter or digit before white space, or the end of the line"
    if cuts.obstacle:
        place = f"its end, since the tokenizer's {cuts.obstacle} allows no cut"
    return DataError(
        "A document is too long to be encoded whole",
        where=f"{part.source.path}, line {line}",
        expected=f"at most {MOST_BLOCK_BYTES} bytes up to {place}",
        found="more",
        fix="Divide it into JSON lines, read JSON lines as one text with --form text, or choose another tokenizer.",
    )


def _document(part: TextPart, number: int, line: bytes) -> tuple[str, int]:
    """Return the text of a line and its hash."""
    key, value = part.options.key, None
    try:
        value = json.loads(line)
        text = value[key]
        return text, xxhash.xxh3_64_intdigest(text.encode())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "A line holds no document",
            where=f"{part.source.path}, line {number}",
            expected=f"a JSON object with a text under {key!r}",
            found=f"the keys {[*value]}" if isinstance(value, dict) and key not in value else f"{error!r:.99}",
            fix="Mend the line, or name the text's key: reprise prepare-data --key KEY.",
        ) from error
