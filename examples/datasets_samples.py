"""Samples of Hugging Face `datasets` in Reprise's trainer: arrow files on disk, read by row and never copied.

    reprise train data=module data.factory=examples.datasets_samples:make data.train=FOLDER data.valid=FOLDER ...

A row of a folder of `Dataset.save_to_disk` has at most `train.seq_length` + 1 `input_ids` and, if it likes, `is_target`
of as many. The trainer keeps the order, epochs and position; a killed run goes on at any number of ranks.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset, load_from_disk


class Rows:
    """The rows of a dataset by number."""

    def __init__(self, rows: Dataset) -> None:
        self._rows = rows.with_format("numpy")
        self._has_mask = "is_target" in rows.column_names

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        row = self._rows[number]
        return (row["input_ids"], row["is_target"]) if self._has_mask else row["input_ids"]


def make(path: str) -> tuple[Rows, str]:
    """Return the rows in a folder, and the fingerprint that `datasets` saved beside them."""
    rows = load_from_disk(path)
    return Rows(rows), rows._fingerprint
