"""Tells the form of a text file by its first bytes, and reads its text in pieces: plain, gzip, Zstandard or Parquet.

Parquet gives a line of JSON for each row. Anything else is refused, unless its bytes are asked for.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import BinaryIO

from reprise.errors import DataError
from trainer.data.parquet import column_texts, missing_package

# Compressed text is held whole for `data=text` alone, where its size does not show before it is read.
MOST_TEXT_BYTES = 4 << 30
_HEAD_BYTES = 8 << 10
_CHUNK_BYTES = 256 << 10
# A block of Zstandard takes at least 4 bytes and holds at most 128 KiB (RFC 8878, sections 3.1.1.2.2 and 3.1.1.2.4), so
# a piece of the file never becomes more than 64 MiB.
_ZSTD_PIECE_BYTES = 2 << 10

_COMPRESSED_SUFFIX = re.compile(r"\.(gz|gzip|zst|zstd)\Z")


class FileForm(Enum):
    """The form of a file whose text can be read."""

    plain = "plain"
    gzip = "gzip"
    zstd = "Zstandard"
    parquet = "Parquet"


# RFC 1952, section 2.3.1; RFC 8878, sections 3.1.1 and 3.1.2; Apache Parquet, "File Format".
_FORMS = {
    FileForm.gzip: re.compile(rb"\x1f\x8b"),
    FileForm.zstd: re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    FileForm.parquet: re.compile(rb"PAR1"),
}
# Other files by their first bytes, and how to make text of them.
_BINARY: tuple[tuple[str, bytes, str], ...] = (
    ("xz", rb"\xfd7zXZ\x00", "Decompress it: xz --decompress --keep FILE."),
    ("bzip2", rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "Decompress it: bzip2 --decompress --keep FILE."),
    ("lz4", rb"\x04\x22\x4d\x18", "Decompress it: lz4 -d FILE."),
    ("7z", rb"7z\xbc\xaf\x27\x1c", "Extract its files: 7z x FILE."),
    ("zip", rb"PK(\x03\x04|\x05\x06)", "Extract its texts: unzip FILE. A checkpoint of torch is no text."),
    ("tar", rb"(?s).{257}ustar", "Extract its files: tar -xf FILE."),
    ("PNG", rb"\x89PNG\r\n", "Leave it out."),
    ("JPEG", rb"\xff\xd8\xff", "Leave it out."),
    ("PDF", rb"%PDF-", "Extract its text: pdftotext FILE."),
    ("pickle", rb"\x80[\x02-\x05]", "Write its texts as JSON lines."),
    ("NumPy", rb"\x93NUMPY", "Tokens in it are prepared with --raw, after numpy.load(FILE).tofile(OTHER)."),
    ("safetensors", rb"(?s).{6}\x00\x00\{", "Leave it out."),
    ("UTF-32", rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff", "Convert it: iconv -f UTF-32 -t UTF-8 FILE."),
    ("UTF-16", rb"\xff\xfe|\xfe\xff", "Convert it: iconv -f UTF-16 -t UTF-8 FILE."),
    ("binary", rb"(?s).*\x00", "Convert it to text in UTF-8, without NUL, or leave it out."),
)
_BINARY_FORMS = [(name, re.compile(pattern), advice) for name, pattern, advice in _BINARY]
_AS_BYTES = (
    "To train on its bytes as they are, write out the tokenizer: --tokenizer bytes, data.tokenizer=bytes in a run."
)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `[lo, hi)` of the text in a file, read as if they were a file; up to the end if `hi` is None."""

    path: Path
    lo: int = 0
    hi: int | None = None


def file_form(path: Path) -> FileForm:
    """Return the form of a file by its first bytes.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return _form(file)
    except OSError as error:
        raise unreadable(path, error) from error


def plain_name(name: str) -> str:
    """Return the name of a file without the suffix of its compression."""
    return _COMPRESSED_SUFFIX.sub("", name)


def text_span(path: Path) -> Span:
    """Return the whole text of a file, to its size of now where it is plain."""
    return Span(path, 0, path.stat().st_size if file_form(path) is FileForm.plain else None)


@contextmanager
def open_text(
    span: Span, *, key: str = "text", takes_bytes: bool = False, checks_utf8: bool = True
) -> Iterator[TextReader]:
    """Yield a reader of the text in a file.

    Args:
        key: the column of a Parquet file.
        takes_bytes: accept any bytes. Compressed files are decompressed even so.
        checks_utf8: check every byte read for UTF-8, beside the first bytes; lines of JSON are checked when they
            are parsed.

    Raises:
        DataError: the file cannot be read, is damaged, or is no text.
    """
    try:
        with span.path.open("rb") as file:
            yield TextReader(span, file, key=key, takes_bytes=takes_bytes, checks_utf8=checks_utf8)
    except OSError as error:
        raise unreadable(span.path, error) from error


class TextReader:
    """Reads the text of a file from its begin to its end, see `open_text`. Memory holds little beyond what is read.

    A byte-order mark is passed over, unless any bytes are accepted. ``at`` is the position in the file's text, in
    bytes.
    """

    def __init__(self, span: Span, file: BinaryIO, *, key: str, takes_bytes: bool, checks_utf8: bool) -> None:
        self._span, self.at = span, 0
        self.form = _form(file)
        self._chunks = _chunks(self.form, file, span.path, key)
        self._waiting = bytearray()
        self._decoder = codecs.getincrementaldecoder("utf-8")() if checks_utf8 and not takes_bytes else None
        lo = span.lo
        if not takes_bytes:
            _check_head(self._peek(_HEAD_BYTES), self.form, span.path)
            if self._peek(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                lo = max(lo, len(codecs.BOM_UTF8))
        if lo and self.form is FileForm.plain:
            file.seek(lo)
            self._waiting.clear()
            self._chunks = _chunks(self.form, file, span.path, key)
            self.at = lo
        while self.at < lo and (passed := self._take(min(_CHUNK_BYTES, lo - self.at))):
            self.at += len(passed)

    def has_more(self) -> bool:
        """Return whether there is more to read.

        Raises:
            DataError: the file ends before the end of the span.
        """
        if self._span.hi is not None and self.at >= self._span.hi:
            return False
        if self._peek(1):
            return True
        if self._span.hi is not None:
            raise DataError(
                "a file changed while it was being read",
                where=self._span.path,
                expected=f"{self._span.hi} bytes",
                found=f"{self.at} bytes",
                fix="Start again when no other program writes to it.",
            )
        return False

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer only at the end.

        Raises:
            DataError: the file cannot be decompressed, or is not UTF-8.
        """
        most = size if self._span.hi is None else min(size, self._span.hi - self.at)
        data = self._take(most)
        if self._decoder is not None:
            pending = self._decoder.getstate()[0]
            self.at += len(data)
            try:
                self._decoder.decode(data, final=not self.has_more())
            except UnicodeDecodeError as error:
                raise not_utf8(self._span.path, self.at - len(data) - len(pending), error) from error
        else:
            self.at += len(data)
        return data

    def read_all(self) -> bytes:
        """Return the remaining bytes.

        Raises:
            DataError: see `read`; or the text is compressed and larger than `MOST_TEXT_BYTES`.
        """
        pieces = []
        while self.has_more():
            pieces.append(self.read(_CHUNK_BYTES))
            if self.form is not FileForm.plain and self.at > MOST_TEXT_BYTES:
                raise DataError(
                    "A compressed text is too large to be held in memory",
                    where=self._span.path,
                    expected=f"at most {MOST_TEXT_BYTES} bytes",
                    found="more",
                    fix="Make token files of it with reprise prepare-data, which reads it in blocks.",
                )
        return b"".join(pieces)

    def _peek(self, size: int) -> bytes:
        while len(self._waiting) < size and (chunk := next(self._chunks, b"")):
            self._waiting += chunk
        return bytes(self._waiting[:size])

    def _take(self, size: int) -> bytes:
        data = self._peek(size)
        del self._waiting[: len(data)]
        return data


def text_bytes(path: Path, *, takes_bytes: bool = False) -> int:
    """Return the size of the text in a file; a compressed file is read for it.

    Raises:
        DataError: see `open_text`.
    """
    span = text_span(path)
    if span.hi is not None:
        return span.hi
    with open_text(span, takes_bytes=takes_bytes, checks_utf8=False) as reader:
        while reader.read(_CHUNK_BYTES):
            pass
        return reader.at


def not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> DataError:
    """Return the error of a text with bytes other than UTF-8.

    Args:
        offset: of the decoded bytes in the text of the file.
    """
    return DataError(
        "a text is not UTF-8",
        where=f"{path}, byte {offset + error.start}",
        expected="UTF-8",
        found=f"byte 0x{error.object[error.start]:02x} ({error.reason})",
        fix=f"Convert the file to UTF-8 with iconv, or leave it out. {_AS_BYTES}",
    )


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error of an unreadable file."""
    return DataError(
        "a file cannot be read", where=path, expected="a readable file", found=error.strerror or str(error)
    )


def _form(file: BinaryIO) -> FileForm:
    """Return the form of an open file, and leave it at its begin."""
    head = file.read(4)
    file.seek(0)
    return next((form for form, magic in _FORMS.items() if magic.match(head)), FileForm.plain)


def _check_head(head: bytes, form: FileForm, path: Path) -> None:
    """Refuse a text with the first bytes of another form of file."""
    inner = next((inner.value for inner, magic in _FORMS.items() if magic.match(head)), None)
    advice = f"Decompress it once: what is in it is {inner} again."
    name = inner if form is not FileForm.plain else None
    if name is None:
        name, advice = next(((n, advice) for n, magic, advice in _BINARY_FORMS if magic.match(head)), (None, ""))
    if name is not None:
        raise DataError(
            "A file is no text",
            where=path,
            expected="text in UTF-8, plain, in gzip, Zstandard or Parquet",
            found=name if form is FileForm.plain else f"{name} in {form.value}",
            fix=f"{advice} {_AS_BYTES}",
        )


def _chunks(form: FileForm, file: BinaryIO, path: Path, key: str) -> Iterator[bytes]:
    """Return the text of an open file in pieces of any size."""
    match form:
        case FileForm.gzip:
            return _gzip_chunks(file, path)
        case FileForm.zstd:
            return _zstd_chunks(file, path)
        case FileForm.parquet:
            texts = column_texts(file, path, key)
            return (json.dumps({key: text}, ensure_ascii=False).encode() + b"\n" for text in texts)
        case FileForm.plain:
            return iter(partial(file.read, _CHUNK_BYTES), b"")


def _gzip_chunks(file: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            yield from iter(partial(stream.read, _CHUNK_BYTES), b"")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, FileForm.gzip, str(error)) from error


def _zstd_chunks(file: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise missing_package("zstandard", "zstd", path) from error
    frame = None
    try:
        while piece := file.read(_ZSTD_PIECE_BYTES):
            while piece:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                if data := frame.decompress(piece):
                    yield data
                piece = b""
                if frame.eof:
                    piece, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise _damaged(path, FileForm.zstd, str(error)) from error
    if frame is not None:
        raise _damaged(path, FileForm.zstd, "the file ends within a frame")


def _damaged(path: Path, form: FileForm, problem: str) -> DataError:
    return DataError(
        "A compressed file is damaged or cut off",
        where=path,
        expected=f"whole {form.value}",
        found=problem,
        fix="Copy or download it again.",
    )
