"""Refuses Git LFS pointers, which replace files not downloaded by a clone."""

from __future__ import annotations

from pathlib import Path

from reprise.errors import CheckpointError
from reprise.storage import is_dir, is_file, matching

_START = b"version https://git-lfs.github.com/"
_MOST_BYTES = 1024  # largest pointer in Git LFS's specification


def refuse_pointers(path: Path) -> None:
    """Refuse a Git LFS pointer, or a folder containing any.

    Raises:
        CheckpointError: There are pointers. The error names them.
        OSError: A file cannot be read.
    """
    names = [file.name for file in (matching(path, "*") if is_dir(path) else [path]) if _is_pointer(file)]
    if names:
        raise CheckpointError(
            "A file is a Git LFS pointer, and its content was not downloaded",
            where=path,
            found=", ".join(sorted(names)),
            fix="Download it with `git lfs pull` in the clone, or with `hf download`.",
        )


def _is_pointer(path: Path) -> bool:
    if not is_file(path) or path.stat().st_size >= _MOST_BYTES:
        return False
    with path.open("rb") as file:
        return file.read(len(_START)) == _START
