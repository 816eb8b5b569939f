"""Reads the texts in a column of a Parquet file, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from reprise.errors import DataError

# Arrow holds the values of so many rows, and reads the file in pieces of so many bytes.
_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20


def column_texts(file: BinaryIO, path: Path, key: str) -> Iterator[str]:
    """Yield the texts of the rows of an open Parquet file.

    Args:
        key: the name of the column.

    Raises:
        DataError: pyarrow is missing, the file is damaged, or a row has no text in the column.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_package("pyarrow", "parquet", path) from error
    rows = 0
    try:
        table = parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        names = list(table.schema_arrow.names)
        if names.count(key) != 1:
            raise _no_text(path, key, f"the columns {', '.join(names)}")
        for batch in table.iter_batches(_BATCH_ROWS, columns=[key], use_threads=False):
            for value in batch.column(0):
                rows += 1
                if not isinstance(text := value.as_py(), str):
                    raise _no_text(f"{path}, row {rows}", key, f"a value of type {value.type}: {text!r:.40}")
                yield text
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            "A Parquet file is damaged or cut off",
            where=path,
            expected="a whole Parquet file",
            found=" ".join(str(error).split())[:300],
            fix="Copy or download it again.",
        ) from error


def _no_text(where: object, key: str, actual: str) -> DataError:
    return DataError(
        "a row holds no document",
        where=where,
        expected=f"a text in the column {key!r}",
        found=actual,
        fix="Filter the file, or name the column of the texts: reprise prepare-data --key COLUMN.",
    )


def missing_package(package: str, extra: str, path: Path) -> DataError:
    """Return the error of a file whose form needs a missing package."""
    return DataError(
        "A package that reads a file is not installed",
        where=path,
        expected=package,
        fix=f"Install it: pip install 'torch-reprise[{extra}]'.",
    )
