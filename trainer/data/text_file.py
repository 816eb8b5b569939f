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
from enum import Enum
from functools import partial
from pathlib import Path
from typing import BinaryIO

from reprise.errors import DataError
from trainer.data.data_file import unreadable
from trainer.data.parquet import column_texts, missing_package

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
# Other files, by their first bytes or a NUL in them. The rest shows in bytes that are not UTF-8.
_BINARY = re.compile(
    rb"(?P<xz>\xfd7zXZ\0)|(?P<bzip2>BZh[1-9]1AY)|(?P<zip>PK\x03\x04)|(?P<PDF>%PDF-)|(?P<NumPy>\x93NUMPY)"
    rb"|(?P<UTF_16>\xff\xfe|\xfe\xff)|(?P<binary>(?s:.*)\0)"
)
_AS_BYTES = (
    "To train on its bytes as they are, write out the tokenizer: --tokenizer bytes, data.tokenizer=bytes in a run."
)


def plain_name(name: str) -> str:
    """Return the name of a file without the suffix of its compression."""
    return _COMPRESSED_SUFFIX.sub("", name)


@contextmanager
def open_text(
    path: Path, *, start: int = 0, key: str = "text", takes_bytes: bool = False, is_raw: bool = False
) -> Iterator[TextReader]:
    """Yield a reader of the text in a file.

    Args:
        start: the first byte of the text to read.
        key: the column of a Parquet file.
        takes_bytes: accept any bytes. Compressed files are decompressed even so.
        is_raw: accept any bytes, as they are.

    Raises:
        DataError: the file cannot be read, is damaged, or is no text by its first bytes.
    """
    try:
        with path.open("rb") as file:
            magic = b"" if is_raw else file.read(4)
            file.seek(0)
            form = next((form for form, pattern in _FORMS.items() if pattern.match(magic)), FileForm.plain)
            yield TextReader(path, file, form, start=start, key=key, takes_bytes=takes_bytes or is_raw)
    except OSError as error:
        raise unreadable(path, error) from error


class TextReader:
    """Reads the text of a file to its end, see `open_text`. Memory holds little beyond what is read.

    A byte-order mark is passed over, unless any bytes are accepted. ``at`` is the position in the file's text, in
    bytes.
    """

    def __init__(self, path: Path, file: BinaryIO, form: FileForm, *, start: int, key: str, takes_bytes: bool) -> None:
        self.form, self._chunks, self._waiting, self.at = form, _chunks(form, file, path, key), bytearray(), 0
        if not takes_bytes:
            head = self._peek(_HEAD_BYTES)
            _check_head(head, self.form, path)
            self.read(len(codecs.BOM_UTF8) * head.startswith(codecs.BOM_UTF8))
        if start > self.at and self.form is FileForm.plain:
            file.seek(start)
            self._chunks, self._waiting, self.at = _chunks(self.form, file, path, key), bytearray(), start
        while self.at < start and self.read(min(_CHUNK_BYTES, start - self.at)):
            pass

    def has_more(self) -> bool:
        """Return whether there is more to read."""
        return bool(self._peek(1))

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer only at the end.

        Raises:
            DataError: the file cannot be decompressed.
        """
        data = self._peek(size)
        del self._waiting[: len(data)]
        self.at += len(data)
        return data

    def _peek(self, size: int) -> bytes:
        while len(self._waiting) < size and (chunk := next(self._chunks, b"")):
            self._waiting += chunk
        return bytes(self._waiting[:size])


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


def _check_head(head: bytes, form: FileForm, path: Path) -> None:
    """Refuse a text with the first bytes of another form of file."""
    binary = _BINARY.match(head)
    name = str(binary.lastgroup).replace("_", "-") if binary else ""
    if form is not FileForm.plain:
        name = next((inner.value for inner, magic in _FORMS.items() if magic.match(head)), name)
    if name:
        raise DataError(
            "A file is no text",
            where=path,
            expected="text in UTF-8, plain, in gzip, Zstandard or Parquet",
            found=name if form is FileForm.plain else f"{name} in {form.value}",
            fix="Decompress it, convert it (iconv -f UTF-16 -t UTF-8 FILE), or leave it out; prepare-data --raw takes "
            f"arrays of tokens. {_AS_BYTES}",
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
