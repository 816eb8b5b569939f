"""Fixed-length samples cut from token files."""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from reprise.errors import DataError, first_of
from trainer.data.data_file import Ints
from trainer.data.document_table import table_of
from trainer.data.documents import PADDED, DocumentMarks, uses_index
from trainer.data.token_file import TokenFile

_log = logging.getLogger(__name__)


class Samples:
    """Windows with ``seq_length + 1`` tokens, starting every ``seq_length`` tokens within each file or document.

    A window's last token is the next window's first, so every token except the first is a target once. Windows never
    cross files. A file's incomplete last window is not used; a warning names files without a window. With
    `per_document`, windows start with a file's documents and never cross their ends. A document's last window is
    padded; its padding, marked by `trainer.data.documents`, has no targets.

    Args:
        sources: Each source's files.
        marks: Marks document starts in the windows. None leaves the windows as they are.
        per_document: Cut documents, using each file's index; see `trainer.data.document_table`.
        seq_length: Inputs (and targets) per sample.

    Attributes:
        source_bounds: int64 [sources + 1]. Source i has samples bounds[i] to bounds[i + 1] - 1.

    Raises:
        DataError: No window fits any file in a source, or an index cannot be read.
    """

    def __init__(
        self,
        *sources: Sequence[TokenFile],
        seq_length: int,
        marks: DocumentMarks | None = None,
        per_document: bool = False,
    ) -> None:
        self._files, self._marks = list(itertools.chain(*sources)), marks
        self.seq_length, self._cuts_documents = seq_length, per_document
        has_tables = uses_index(marks, per_document=per_document)
        self._tables = [table_of(file, seq_length) if has_tables else None for file in self._files]
        sizes = [max(file.count - 1, 0) // seq_length for file in self._files]
        least = f"file of at least {seq_length + 1} tokens (seq_length + 1)"
        if per_document:
            sizes, least = [table.samples for table in self._tables if table], "document of at least 2 tokens"
        # File i has samples bounds[i] to bounds[i + 1] - 1.
        self._bounds = [*itertools.accumulate(sizes, initial=0)]
        self.source_bounds: Ints = np.array(self._bounds)[np.cumsum([0, *map(len, sources)])]
        for files, count in zip(sources, np.diff(self.source_bounds), strict=True):
            if not count:
                raise DataError(
                    "The data has no complete sample",
                    where=", ".join(str(file.path) for file in files) or "no files",
                    expected=f"a {least}",
                    fix="Add data." if per_document else "Add data, or set a smaller train.seq_length.",
                )
        if short := [file.path for file, size in zip(self._files, sizes, strict=True) if not size]:
            _log.warning(
                f"{len(short)} of {len(sizes)} files give no sample, which needs a {least}: {first_of(short, 20)}"
            )

    @property
    def count(self) -> int:
        """Return the sample count over all files."""
        return self._bounds[-1]

    def windows(self, ids: Ints) -> Ints:
        """Copy samples from the files.

        Args:
            ids: Shape [n], values in range(count), in any order, repeats allowed. They number the samples through all
                sources.

        Returns:
            int64 [n, seq_length + 1]. Inputs are ``[:, :-1]``, targets ``[:, 1:]``. For `marks`, see
            `trainer.data.documents`.

        Raises:
            DataError: A file was truncated after it was opened, or cannot be read.
        """
        out = np.empty((ids.size, self.seq_length + 1), dtype=np.int64)
        if self._cuts_documents:
            out.fill(PADDED)
        for row, identity in zip(out, ids.tolist(), strict=True):
            number = bisect_right(self._bounds, identity) - 1
            sample, file, table = identity - self._bounds[number], self._files[number], self._tables[number]
            start, end = sample * self.seq_length, file.count
            if self._cuts_documents and table:
                start, end = table.locate(sample)
            stop = min(start + self.seq_length + 1, end)
            row[: stop - start] = file.read(start, stop)
            if self._marks is not None:
                self._marks.mark(row[: stop - start], table, start)
        return out
