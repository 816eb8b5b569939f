"""Samples of fixed length cut from token files, and the positions of each micro batch in a global batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.data.token_file import TokenFile
from trainer.errors import DataError


class Samples:
    """Windows of ``seq_length + 1`` tokens that start every ``seq_length`` tokens within each file.

    The last token of a window is the first of the next, so every token except a file's first is a target once. Windows
    never cross files; tokens at the end of a file that do not fill a window are not used.

    Raises:
        DataError: not one window fits any file.
        ValueError: ``seq_length`` is not positive.
    """

    __slots__ = ("_bounds", "_files", "_seq_length")

    def __init__(self, files: Sequence[TokenFile], *, seq_length: int) -> None:
        if seq_length < 1:
            raise ValueError(f"expected a positive seq_length, found {seq_length}")
        counts = [max(0, file.count - 1) // seq_length for file in files]
        self._files = tuple(files)
        self._seq_length = seq_length
        # The samples of file i are bounds[i] to bounds[i + 1] - 1.
        self._bounds = np.cumsum(np.array([0, *counts], dtype=np.int64))
        if not any(counts):
            raise DataError(
                "there is not one sample in the data",
                where=", ".join(str(file.path) for file in files) or "no files",
                expected=f"a file of at least {seq_length + 1} tokens (seq_length + 1)",
                found=f"at most {max((file.count for file in files), default=0)} tokens",
                fix="Give more data or a smaller seq_length.",
            )

    @property
    def count(self) -> int:
        """Return the number of samples in all files."""
        return int(self._bounds[-1])

    @property
    def seq_length(self) -> int:
        """Return the number of inputs (and of targets) of a sample."""
        return self._seq_length

    def windows(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Copy samples out of the files.

        Args:
            ids: shape [n], values in range(count), in any order, repeats allowed.

        Returns:
            int64 of shape [n, seq_length + 1]; inputs are ``[:, :-1]``, targets ``[:, 1:]``.

        Raises:
            DataError: a file was cut since it was opened, or cannot be read.
            IndexError: an id is outside range(count).
        """
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.count):
            raise IndexError(f"expected samples in range({self.count}), found {int(ids.min())} to {int(ids.max())}")
        numbers = np.searchsorted(self._bounds, ids, side="right") - 1
        starts = (ids - self._bounds[numbers]) * self._seq_length
        out = np.empty((ids.size, self._seq_length + 1), dtype=np.int64)
        for row, (number, start) in enumerate(zip(numbers.tolist(), starts.tolist(), strict=True)):
            out[row] = self._files[number].read(start, start + self._seq_length + 1)
        return out


def micro_batch_positions(consumed: int, *, number: int, micro_batch_size: int) -> range:
    """Return the global positions of one micro batch of an iteration.

    Micro batches follow each other, so all of them are each position of the global batch once.

    Args:
        consumed: samples consumed before this iteration, over all coordinates.
        number: of the micro batch in the iteration, over all coordinates, from 0.

    Raises:
        ValueError: a number is negative or the size is not positive.
    """
    if consumed < 0 or number < 0 or micro_batch_size < 1:
        raise ValueError(
            f"impossible micro batch: consumed {consumed}, micro batch {number} of size {micro_batch_size}"
        )
    first = consumed + number * micro_batch_size
    return range(first, first + micro_batch_size)
