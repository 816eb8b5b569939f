"""Reads the texts in a column of a Parquet file, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from reprise.errors import DataError

# Arrow holds the values of so many rows, and reads the file in pieces of so many bytes.
_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20


def row_count(path: Path) -> int:
    """Return the number of rows of a Parquet file.

    Raises:
        DataError: the file cannot be read, or pyarrow is missing.
    """
    with path.open("rb") as file:
        return int(_opened(file, path).metadata.num_rows)


def column_texts(file: BinaryIO, path: Path, key: str) -> Iterator[str]:
    """Yield the texts of the rows of an open Parquet file.

    Args:
        key: the name of the column.

    Raises:
        DataError: pyarrow is missing, the file is damaged, or a row has no text in the column.
    """
    table = _opened(file, path)
    import pyarrow

    _check_column(table.schema_arrow, key, path)
    rows = 0
    try:
        for batch in table.iter_batches(_BATCH_ROWS, columns=[key], use_threads=False):
            for value in batch.column(0):
                rows += 1
                text = value.as_py()
                if text is None:
                    raise DataError(
                        "a row holds no document",
                        where=f"{path}, row {rows}",
                        expected=f"a text in the column {key!r}",
                        found="null",
                        fix="Filter the file, or name the column of the texts with --key.",
                    )
                yield text
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def missing_package(package: str, extra: str, path: Path) -> DataError:
    """Return the error of a file whose form needs a missing package."""
    return DataError(
        "A package that reads a file is not installed",
        where=path,
        expected=package,
        fix=f"Install it: pip install 'torch-reprise[{extra}]'.",
    )


def _opened(file: BinaryIO, path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_package("pyarrow", "parquet", path) from error
    try:
        return parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _check_column(schema: Any, key: str, path: Path) -> None:
    from pyarrow import types

    names = list(schema.names)
    kind = schema.field(key).type if names.count(key) == 1 else None
    if kind is not None and types.is_dictionary(kind):
        kind = kind.value_type
    if kind is None or not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(
            "A Parquet file has no such column of texts",
            where=path,
            expected=f"the column {key!r} with strings",
            found=f"the columns {', '.join(names)}" if kind is None else f"{key!r} with values of type {kind}",
            fix="Name the column of the texts: reprise prepare-data --key COLUMN.",
        )


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        "A Parquet file is damaged or cut off",
        where=path,
        expected="a whole Parquet file",
        found=" ".join(str(error).split())[:300],
        fix="Copy or download it again.",
    )
