"""Where the documents of a file of tokens begin, read from its open index by position: nothing is held in memory."""

from __future__ import annotations

import bisect
import errno
import os
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError

READ_DOCUMENTS = 1 << 18  # a pass over an index reads so many at once


class DocumentIndex(ABC):
    """An open index of documents, whose format a subclass knows.

    Args:
        descriptor: of the index, closed with this object.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @property
    @abstractmethod
    def count(self) -> int:
        """Return the number of documents."""

    @abstractmethod
    def borders(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the first positions of documents `first` to `stop` - 1, by default of all, and the end of the last.

        Returns:
            Ascending, shape [stop - first + 1].

        Raises:
            DataError: the index cannot be read, or is damaged there.
        """

    def status(self) -> os.stat_result:
        """Return the status of the open index."""
        return os.fstat(self._descriptor)

    @abstractmethod
    def _begin(self, document: int) -> int:
        """Return the position of the first token of a document."""

    def begins(self, start: int, stop: int) -> list[int]:
        """Return the positions in range(start, stop) at which a document begins, in ascending order.

        Raises:
            DataError: the index cannot be read, or is damaged there.
        """
        positions: list[int] = []
        for number in range(bisect.bisect_left(range(self.count), start, key=self._begin), self.count):
            begin = self._begin(number)
            if begin >= stop:
                break
            if begin < (positions[-1] if positions else start):
                raise damaged(self.path, "documents in ascending order", f"document {number} at token {begin}")
            if not positions or begin > positions[-1]:  # an empty document begins where the next one does
                positions.append(begin)
        return positions

    def _array(self, at: int, count: int) -> npt.NDArray[np.int64]:
        """Return `count` int64 from a byte of the index on."""
        values = np.empty(count, dtype="<i8")
        unread = values.view(np.uint8).data
        while unread.nbytes:
            try:
                read_bytes = os.preadv(self._descriptor, [unread], at)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not read_bytes:
                raise damaged(self.path, f"{8 * count} bytes", f"{unread.nbytes} fewer")
            unread, at = unread[read_bytes:], at + read_bytes
        return values

    def _read(self, at: int) -> int:
        """Return the int64 at a byte of the index."""
        return int(self._array(at, 1)[0])


def damaged(place: Path, expected: str, actual: str) -> DataError:
    """Return the error of an index whose numbers cannot be right."""
    return DataError(
        "An index of documents is damaged",
        where=place,
        expected=expected,
        found=actual,
        fix="Copy it again, or write both files again.",
    )


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error of an unreadable file of tokens, or of its index."""
    fix = "Check data.train and data.valid, or write the file again."
    if error.errno == errno.EMFILE:
        fix = "Raise the limit of open files (ulimit -Hn), or make fewer, larger files."
    return DataError(
        "a token file cannot be read",
        where=path,
        expected="a readable file",
        found=error.strerror or str(error),
        fix=fix,
    )
