"""Reads a text file in pieces: plain, or unpacked from gzip, Zstandard or Parquet, which its first bytes show.

Each Parquet row becomes a JSON line.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from reprise.errors import DataError
from trainer.data.data_file import unreadable

BLOCK_BYTES = 256 << 10  # bytes to read at a time, and in a block of text
# A Zstandard block takes at least 4 bytes and holds at most 128 KiB (RFC 8878, sections 3.1.1.2.2 and 3.1.1.2.4), so a
# file piece never expands to more than 32 MiB.
_PIECE_BYTES = 1 << 10
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
        DataError: A package is missing, or the file is damaged.
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
            yield from read(file, key)
    except (EOFError, OSError, ValueError, getattr(package, damage)) as error:
        raise DataError(
            "The compressed file is damaged or truncated",
            where=path,
            expected=f"a complete {form} file",
            found=" ".join(str(error).split())[:300],
            fix="Copy or download it again.",
        ) from error


def _frames(start: Callable[[], Any], file: BinaryIO, _: str) -> Iterator[bytes]:
    """Yield the content of a file's frames, or members.

    Args:
        start: Returns a frame's decompressor.
    """
    frame = None
    while piece := file.read(_PIECE_BYTES):
        while piece:
            frame = frame or start()
            yield frame.decompress(piece)
            piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ends within a frame")


def _gzip_frame() -> Any:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


def _zstd_frame() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


def _parquet_chunks(file: BinaryIO, key: str) -> Iterator[bytes]:
    """Yield a JSON line for each row's text in the column `key`. Without one such column, a line has all columns."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    if (names := table.schema_arrow.names).count(key) != 1:
        yield json.dumps(dict.fromkeys(names)).encode()
        return
    for batch in table.iter_batches(_BATCH_ROWS, columns=[key], use_threads=False):
        for row in batch.to_pylist():
            yield json.dumps(row, ensure_ascii=False, default=_json_value).encode("utf-8", "surrogateescape") + b"\n"


def _json_value(value: object) -> object:
    """Return bytes as text, and another value that JSON lacks, such as a time, as a list, which is no text."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else [str(value)]


# Each form's reader, the package it needs, and the package's error class.
_READERS: dict[str, tuple[Callable[[BinaryIO, str], Iterator[bytes]], str, str]] = {
    "gzip": (partial(_frames, _gzip_frame), "zlib", "error"),
    "Zstandard": (partial(_frames, _zstd_frame), "zstandard", "ZstdError"),
    PARQUET: (_parquet_chunks, "pyarrow", "ArrowException"),
}
