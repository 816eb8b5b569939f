"""Reads a text file in pieces: plain, or unpacked from gzip, Zstandard or Parquet, which its first bytes show.

Each Parquet row becomes a JSON line.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from reprise.errors import DataError
from trainer.data.data_file import unreadable

BLOCK_BYTES = 256 << 10  # bytes to read at a time, and in a block of text
# A Zstandard block takes at least 4 bytes and holds at most 128 KiB (RFC 8878, sections 3.1.1.2.2 and 3.1.1.2.4), so a
# file piece never expands to more than 32 MiB.
_ZSTD_PIECE_BYTES = 1 << 10
# Rows Arrow holds at a time, and bytes it reads at a time.
_BATCH_ROWS, _BUFFER_BYTES = 64, 1 << 20

PARQUET = "Parquet"
_COMPRESSED_SUFFIX = re.compile(r"\.(gz|gzip|zst|zstd)\Z")
# RFC 1952, section 2.3.1; RFC 8878, sections 3.1.1 and 3.1.2; Apache Parquet, "File Format".
_FORM = re.compile(rb"(?P<gzip>\x1f\x8b)|(?P<Zstandard>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)|(?P<Parquet>PAR1)")


def plain_name(name: str) -> str:
    """Return a file name without its compression suffix."""
    return _COMPRESSED_SUFFIX.sub("", name)


def packing(path: Path) -> str:
    """Return the form to unpack a file from, such as `PARQUET`. Empty if it is read as it is.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            match = _FORM.match(file.read(4))
    except OSError as error:
        raise unreadable(path, error) from error
    return str(match.lastgroup) if match else ""


def read_text(path: Path, *, start: int = 0, stop: int = sys.maxsize, key: str = "text") -> Iterator[bytes]:
    """Yield a file's text in nonempty pieces.

    Args:
        start: First text byte to read.
        stop: End byte.
        key: Parquet column.

    Raises:
        DataError: The file cannot be read, or is damaged.
    """
    pieces = _unpacked(form, path, key) if (form := packing(path)) else _read_plain(path, start)
    at = 0 if form else start
    for piece in pieces:
        if part := piece[max(0, start - at) : max(0, stop - at)]:
            yield part
        at += len(piece)
        if at >= stop:
            break


def _read_plain(path: Path, start: int) -> Iterator[bytes]:
    """Yield a file as it is, from a byte on, in pieces of `BLOCK_BYTES`, the last one shorter.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            yield from iter(partial(file.read, BLOCK_BYTES), b"")
    except OSError as error:
        raise unreadable(path, error) from error


def _unpacked(form: str, path: Path, key: str) -> Iterator[bytes]:
    """Yield a file's text, unpacked, in pieces of any size.

    Raises:
        DataError: A package is missing, the file is damaged, or a row has no text in the column `key`.
    """
    read, name, damage = _READERS[form]
    try:
        package = import_module(name)
    except ImportError as error:
        raise DataError(
            "The package that reads this file is not installed",
            where=path,
            expected=name,
            fix=f"Install it: pip install {name}.",
        ) from error
    try:
        with path.open("rb") as file:
            yield from read(file, path, key)
    except (EOFError, OSError, UnicodeDecodeError, getattr(package, damage)) as error:
        raise DataError(
            "The compressed file is damaged or truncated",
            where=path,
            expected=f"a complete {form} file",
            found=" ".join(str(error).split())[:300],
            fix="Copy or download it again.",
        ) from error


def _gzip_chunks(file: BinaryIO, path: Path, key: str) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as stream:
        yield from iter(partial(stream.read, BLOCK_BYTES), b"")


def _zstd_chunks(file: BinaryIO, path: Path, key: str) -> Iterator[bytes]:
    import zstandard

    frame = None
    while piece := file.read(_ZSTD_PIECE_BYTES):
        while piece:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if data := frame.decompress(piece):
                yield data
            piece = b""
            if frame.eof:
                piece, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("the file ends within a frame")


def _parquet_chunks(file: BinaryIO, path: Path, key: str) -> Iterator[bytes]:
    """Yield a JSON line for each row's text in the column `key`."""
    from pyarrow import parquet

    table, rows = parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False), 0
    names = list(table.schema_arrow.names)
    if names.count(key) != 1:
        raise _no_text(path, key, f"columns {', '.join(names)}")
    for batch in table.iter_batches(_BATCH_ROWS, columns=[key], use_threads=False):
        for value in batch.column(0):
            rows += 1
            if not isinstance(text := value.as_py(), str):
                raise _no_text(f"{path}, row {rows}", key, f"a value of type {value.type}: {text!r:.40}")
            yield json.dumps({key: text}, ensure_ascii=False).encode() + b"\n"


# Each form's reader, the package it needs, and the package's error class.
_READERS: dict[str, tuple[Callable[[BinaryIO, Path, str], Iterator[bytes]], str, str]] = {
    "gzip": (_gzip_chunks, "zlib", "error"),
    "Zstandard": (_zstd_chunks, "zstandard", "ZstdError"),
    PARQUET: (_parquet_chunks, "pyarrow", "ArrowException"),
}


def _no_text(where: object, key: str, actual: str) -> DataError:
    return DataError(
        "A row holds no document",
        where=where,
        expected=f"a text in the column {key!r}",
        found=actual,
        fix="Filter the file, or set the text column: reprise prepare-data --key COLUMN.",
    )
