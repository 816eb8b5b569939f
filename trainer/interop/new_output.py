"""Writes an export, which appears at its path complete or not at all, and reports failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.storage import Files, atomic_output, cannot_write, is_dir, lexists


@contextmanager
def new_output(out: Path, files: Files) -> Iterator[Path]:
    """Yield a temporary path to write a file or folder to. It becomes `out` afterwards. The caller syncs its files.

    Raises:
        CheckpointError: `out` exists, its parent folder does not, or the file system fails. Nothing is left behind.
    """
    _check_free(out)
    try:
        with atomic_output(out, files) as partial:
            yield partial
    except OSError as error:
        _check_free(out)  # another process may have created it meanwhile
        raise cannot_write(out, error, what="The output", files=files, another="another path") from error


def _check_free(out: Path) -> None:
    if lexists(out):
        raise CheckpointError("The output path already exists", where=out, fix="Move it, or choose another path.")
    if not is_dir(out.parent):
        raise CheckpointError(
            "The parent folder does not exist", where=out.parent, fix="Create it, or choose another path."
        )
