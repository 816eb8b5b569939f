"""Samples of fixed length cut from token files, and the order of the samples of several sources."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError, count_of
from trainer.data.blend import Blend
from trainer.data.document_table import table_of
from trainer.data.documents import PADDED, DocumentMarks, uses_index
from trainer.data.order import sample_ids_at
from trainer.data.position_map import PositionMap
from trainer.data.token_file import TokenFile, listed

Ints = npt.NDArray[np.int64]
_log = logging.getLogger(__name__)
_ALONE, _NO_GAPS = Blend([Fraction(1)]), PositionMap()


def positions_of(position_map: PositionMap, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the positions of the samples with these counts from 0."""
    borders, totals = (np.array(numbers, np.int64) for numbers in position_map.steps())
    return counts + totals[np.searchsorted(borders, counts, side="right")]


class Samples:
    """Windows of ``seq_length + 1`` tokens, one every ``seq_length`` tokens within each file, or each document.

    The last token of a window is the first of the next, so every token except the first is a target once. Windows
    never cross files. An incomplete window at the end of a file is not used; a warning names files without a window.
    With `per_document` windows begin with the documents of a file and never cross their ends: the last window of a
    document is padded, and its padding, which `trainer.data.documents` marks, is no target.

    Args:
        marks: marks the begins of documents in the windows; None leaves them as they are.
        per_document: cut documents, by the index of each file, see `trainer.data.document_table`.
        seq_length: the number of inputs (and of targets) of a sample.
        cache: the folder of prepared data; without, every process reads the complete index.

    Raises:
        DataError: no window fits any file, or an index cannot be read.
        ValueError: ``seq_length`` is not positive.
    """

    __slots__ = ("_bounds", "_cuts_documents", "_files", "_marks", "_tables", "seq_length")

    def __init__(
        self,
        files: Sequence[TokenFile],
        *,
        seq_length: int,
        marks: DocumentMarks | None = None,
        per_document: bool = False,
        cache: Path | None = None,
    ) -> None:
        if seq_length < 1:
            raise ValueError(f"expected a positive seq_length, found {seq_length}")
        self._files, self._marks = tuple(files), marks
        self.seq_length = seq_length
        self._cuts_documents = per_document
        has_tables = uses_index(marks, per_document=per_document)
        self._tables = [table_of(file, seq_length=seq_length, cache=cache) if has_tables else None for file in files]
        sizes, lengths = [max(file.count - 1, 0) // seq_length for file in files], [file.count for file in files]
        if per_document:
            tables = [table for table in self._tables if table is not None]
            sizes, lengths = [table.samples for table in tables], [table.longest for table in tables]
        # The samples of file i are bounds[i] to bounds[i + 1] - 1.
        self._bounds = np.cumsum([0, *sizes])
        unit, least = (
            ("document", "2 tokens") if per_document else ("file", f"{seq_length + 1} tokens (seq_length + 1)")
        )
        if not self.count:
            raise DataError(
                "there is not one sample in the data",
                where=", ".join(str(file.path) for file in files) or "no files",
                expected=f"a {unit} of at least {least}",
                found=f"at most {count_of(max(lengths, default=0), 'token')}",
                fix="Give more data." if per_document else "Give more data or a smaller seq_length.",
            )
        if short := [file.path for file, size in zip(files, sizes, strict=True) if not size]:
            _log.warning(
                f"{len(short)} of {len(files)} files give no sample, which needs a {unit} of at least {least}: "
                f"{listed(short)}"
            )

    @property
    def count(self) -> int:
        """Return the number of samples in all files."""
        return int(self._bounds[-1])

    @property
    def path(self) -> Path:
        """Return the first file."""
        return self._files[0].path

    def windows(self, ids: Ints) -> Ints:
        """Copy samples out of the files.

        Args:
            ids: shape [n], values in range(count), in any order, repeats allowed.

        Returns:
            int64 of shape [n, seq_length + 1]; inputs are ``[:, :-1]``, targets ``[:, 1:]``; with `marks`, see
            `trainer.data.documents`.

        Raises:
            DataError: a file was cut since it was opened, or cannot be read.
            IndexError: an id is outside range(count).
        """
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.count):
            raise IndexError(f"expected samples in range({self.count}), found {int(ids.min())} to {int(ids.max())}")
        numbers = np.searchsorted(self._bounds, ids, side="right") - 1
        starts, stops = self._extents(numbers, ids - self._bounds[numbers])
        out = np.full((ids.size, self.seq_length + 1), PADDED, dtype=np.int64)
        for row, number, start, stop in zip(out, numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
            row[: stop - start] = self._files[number].read(start, stop)
            if self._marks is not None:
                self._marks.mark(row[: stop - start], self._tables[number], start)
        return out

    def _extents(self, numbers: Ints, samples: Ints) -> tuple[Ints, Ints]:
        """Return the first token and the end of samples, each int64 [n].

        Args:
            numbers: int64 [n], of the file of each sample.
            samples: int64 [n], of each sample in its file.
        """
        starts = samples * self.seq_length
        if not self._cuts_documents:
            return starts, starts + self.seq_length + 1
        ends = np.empty_like(starts)
        for number in np.unique(numbers).tolist():
            rows, table = numbers == number, self._tables[number]
            assert table is not None
            starts[rows], ends[rows] = table.locate(samples[rows])
        return starts, np.minimum(starts + self.seq_length + 1, ends)


@dataclass(frozen=True, slots=True)
class OrderedSamples:
    """The samples of sources by weight, each in an order and epochs of its own, and some passed over.

    Args:
        blend: of as many sources.
        position: the global position at which the blend begins.
        consumed: for each source the number of samples consumed before; zeros by default.
        position_map: the positions of the samples that a run counts.
    """

    sources: Sequence[Samples]
    blend: Blend = _ALONE
    position: int = 0
    consumed: Sequence[int] | None = None
    position_map: PositionMap = _NO_GAPS
    # The samples of source i are bounds[i] to bounds[i + 1] - 1 of all.
    _bounds: Ints = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bounds", np.cumsum([0, *(source.count for source in self.sources)]))

    @property
    def count(self) -> int:
        """Return the number of samples of all sources."""
        return int(self._bounds[-1])

    def sample_ids(self, counts: Ints, seed: int) -> Ints:
        """Return the samples with these counts from 0, int64 [n], numbered through all sources."""
        sources, index = self.blend.locate(positions_of(self.position_map, counts) - self.position)
        if self.consumed is not None:
            index = index + np.array(self.consumed, np.int64)[sources]
        return self._bounds[sources] + sample_ids_at(index, epoch_sizes=np.diff(self._bounds)[sources], seed=seed)

    def windows(self, ids: Ints) -> Ints:
        """Copy samples, by their numbers through all sources, out of the files; see `Samples.windows`."""
        if len(self.sources) == 1:
            return self.sources[0].windows(ids)
        numbers = np.searchsorted(self._bounds, ids, side="right") - 1
        out = np.empty((ids.size, self.sources[0].seq_length + 1), dtype=np.int64)
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            out[rows] = self.sources[number].windows(ids[rows] - self._bounds[number])
        return out
