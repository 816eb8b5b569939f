"""Data files that stay open: read by position, never mapped into memory, and written atomically.

Truncating a mapped file kills the process with SIGBUS and without a message; pread returns fewer bytes. If a file is
replaced under the same name, reads still return the old content.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError
from reprise.storage import FILE_SYSTEM, atomic_output, lexists, open_regular

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]
Ints: TypeAlias = npt.NDArray[np.int64]


class DataFile:
    """An open regular file, whose descriptor is closed with this object.

    Raises:
        DataError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = open_regular(path)
        except OSError as error:
            raise unreadable(path, error) from error
        weakref.finalize(self, os.close, self._descriptor)

    def status(self) -> os.stat_result:
        """Return the file's status."""
        return os.fstat(self._descriptor)

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return self.status().st_size

    def fill(self, values: npt.NDArray[Any], at: int) -> int:
        """Fill an array with bytes from a position on, and return how many bytes are missing.

        Raises:
            DataError: The file cannot be read.
        """
        unread = values.view(np.uint8).data
        while unread.nbytes:
            try:
                read_bytes = os.preadv(self._descriptor, [unread], at)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not read_bytes:
                break
            unread, at = unread[read_bytes:], at + read_bytes
        return unread.nbytes


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for an unreadable file."""
    fix = "Raise the limit of open files (ulimit -Hn), or make fewer, larger files."
    return DataError(
        "A file cannot be read",
        where=path,
        expected="a readable file",
        found=error.strerror or str(error),
        fix=fix if error.errno == errno.EMFILE else None,
    )


def wrong_size(path: Path, expected: object, size: int) -> DataError:
    """Return the error for a token file whose size contradicts its header or index."""
    return DataError(
        "A token file has another size than its header or index states",
        where=path,
        expected=expected,
        found=f"{size} bytes",
        fix="It is truncated, still being written, or from another data set: write or copy it again, with its index.",
    )


def changed(path: Path, before: int, after: int) -> DataError:
    """Return the error for a file that another program has changed, given both sizes in bytes."""
    return DataError(
        "A data file changed while it was being read",
        where=path,
        expected=f"{before} bytes",
        found=f"{after} bytes, or a new modification time",
        fix="Start again when no other program is writing to it.",
    )


@contextmanager
def new_path(path: Path, *, replaces: bool) -> Iterator[Path]:
    """Yield a path to write a file or folder to, which then becomes `path`. Its folder is created if necessary.

    Raises:
        DataError: The file system fails, or `path` exists and `replaces` is False.
    """
    try:
        if not replaces and lexists(path):
            raise DataError("The output path already exists", where=path, fix="Remove it, or choose another path.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_output(path, FILE_SYSTEM, replaces=replaces) as partial:
            yield partial
    except OSError as error:
        raise DataError(
            "Token files cannot be written",
            where=path,
            found=error.strerror or str(error),
            fix="Check free space and permissions, or choose another folder (--output, or data.cache).",
        ) from error


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which appears under its name complete and durable. Processes may race to write it.

    Raises:
        DataError: The file system fails.
    """
    with new_path(path, replaces=True) as partial, partial.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def fitting_chunks(
    path: Path, chunks: Iterable[TokenArray], dtype: np.dtype[Any], *, largest: int
) -> Iterator[TokenArray]:
    """Yield the chunks, converted to a file's dtype.

    Raises:
        DataError: A token does not fit the file.
    """
    for chunk in chunks:
        if (wrong := chunk[(chunk < 0) | (chunk > largest)]).size:
            raise DataError(
                "A token is out of range for the file's dtype",
                where=path,
                expected=f"0 to {largest} ({dtype.name})",
                found=wrong[0],
                fix="Use uint32 for vocabularies above 65536.",
            )
        yield np.ascontiguousarray(chunk, dtype)
