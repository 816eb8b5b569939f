"""Where the documents of a file of tokens begin, read from its open index by position: nothing is held in memory."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError
from trainer.data.data_file import DataFile

READ_DOCUMENTS = 1 << 18  # a pass over an index reads so many at once


class DocumentIndex(DataFile, ABC):
    """An open index of `count` documents, whose format a subclass knows."""

    count: int

    @abstractmethod
    def borders(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the first positions of documents `first` to `stop` - 1, by default of all, and the end of the last.

        Returns:
            Ascending, shape [stop - first + 1].

        Raises:
            DataError: the index cannot be read, or is damaged there.
        """

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

    def _array(self, at: int, count: int, dtype: str = "<i8") -> npt.NDArray[np.int64]:
        """Return `count` numbers from a byte of the index on."""
        values = np.empty(count, dtype=dtype)
        if missing_bytes := self.fill(values, at):
            raise damaged(self.path, f"{values.nbytes} bytes", f"{missing_bytes} fewer")
        return values

    def _read(self, at: int, dtype: str = "<i8") -> int:
        """Return the number at a byte of the index."""
        return int(self._array(at, 1, dtype)[0])


def damaged(place: Path, expected: str, actual: str) -> DataError:
    """Return the error of an index whose numbers cannot be right."""
    return DataError(
        "An index of documents is damaged",
        where=place,
        expected=expected,
        found=actual,
        fix="Copy it again, or write both files again.",
    )


def other_size(path: Path, index: Path, expected: str, size: int) -> DataError:
    """Return the error of a file of tokens with another size than its index tells."""
    return DataError(
        "The size of a file of tokens differs from its index",
        where=path,
        expected=f"{expected}, by {index.name}",
        found=f"{size} bytes",
        fix="One of them was cut off, is still being written, or is of another data set: copy or write both again.",
    )
