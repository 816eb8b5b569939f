"""Reads a token file's documents from their open index by position, keeping nothing in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError
from trainer.data.data_file import DataFile

READ_DOCUMENTS = 1 << 18  # documents read at once in a pass over an index


class DocumentIndex(DataFile, ABC):
    """An open index with `count` documents, in a format known to the subclass."""

    count: int

    @abstractmethod
    def borders(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the first positions of documents `first` to `stop` - 1, by default all, and the last document's end.

        Returns:
            Ascending, shape [stop - first + 1].

        Raises:
            DataError: The index cannot be read, or is damaged there.
        """

    def _array(self, at: int, count: int, dtype: str = "<i8") -> npt.NDArray[np.int64]:
        """Return `count` numbers from a byte offset in the index on."""
        values = np.empty(count, dtype=dtype)
        if missing_bytes := self.fill(values, at):
            raise damaged(self.path, f"{values.nbytes} bytes", f"{missing_bytes} fewer")
        return values

    def _checked(self, borders: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.int64]:
        """Return borders, or ends, after checking that they ascend from at least 0 to at most `end`."""
        if borders.size and (int(borders[0]) < 0 or int(borders[-1]) > end or (borders[1:] < borders[:-1]).any()):
            actual = f"{int(borders[0])} to {int(borders[-1])}, or not ascending"
            raise damaged(self.path, f"ascending document offsets, up to {end}", actual)
        return borders


def damaged(place: Path, expected: str, actual: str) -> DataError:
    """Return the error for an index whose numbers cannot be right."""
    return DataError(
        "The document index is damaged, or has an unsupported format",
        where=place,
        expected=expected,
        found=actual,
        fix="Copy it again, or write both files again.",
    )


def other_size(path: Path, index: Path, expected: str, size: int) -> DataError:
    """Return the error for a token file whose size contradicts its index."""
    return DataError(
        "The size of a token file does not match its index",
        where=path,
        expected=f"{expected}, by {index.name}",
        found=f"{size} bytes",
        fix="One of them is truncated, still being written, or from another data set: copy or write both again.",
    )
