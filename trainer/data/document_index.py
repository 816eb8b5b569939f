"""Reads a token file's documents from their open index by position, keeping nothing in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from reprise.errors import DataError
from trainer.data.data_file import DataFile, Ints

READ_DOCUMENTS = 1 << 18  # documents read at once in a pass over an index


class DocumentIndex(DataFile, ABC):
    """An open index with `count` documents, in a format known to the subclass."""

    count: int

    @abstractmethod
    def borders(self, first: int, stop: int) -> Ints:
        """Return the first positions of documents `first` to `stop` - 1, and the last document's end.

        Returns:
            Ascending, shape [stop - first + 1].

        Raises:
            DataError: The index cannot be read, or is damaged there.
        """

    def _array(self, at: int, count: int, dtype: str = "<i8") -> Ints:
        """Return `count` numbers from a byte offset in the index on."""
        values = np.empty(count, dtype=dtype)
        if missing_bytes := self.fill(values, at):
            raise damaged(self.path, f"{values.nbytes} bytes", f"{missing_bytes} fewer")
        return values

    def _checked(self, borders: Ints, end: int) -> Ints:
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
