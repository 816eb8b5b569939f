"""Writes files and folders atomically: under a temporary name, synced to disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reprise.storage.files import Files
from reprise.storage.paths import exists, is_dir, is_symlink, lexists


def temporary_of(path: Path) -> Path:
    """Return the temporary path for `replace_file`. A killed process may leave a file there."""
    return path.with_name(f".{path.name}.new")


def replace_file(files: Files, path: Path, data: bytes) -> None:
    """Replace a file's content atomically and durably. Only one process at a time may do this."""
    temporary = temporary_of(path)
    files.write_whole(temporary, data)
    files.rename(temporary, path)
    files.sync_folder(path.parent)


@contextmanager
def atomic_output(path: Path, files: Files, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`. After the block, rename it to `path` and make the name durable.

    The caller writes a file or folder there and syncs its files; this function syncs folders. If the block raises, or
    leaves nothing at the temporary path, `path` stays unchanged. The temporary path is always removed.

    Args:
        replaces: Whether to replace an existing file.

    Raises:
        OSError: The file system fails, or `path` exists and `replaces` is False (EEXIST).
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        if not lexists(partial):
            return
        if is_dir(partial):
            sync_folders(files, partial)
        if not replaces and lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        files.rename(partial, path)
        files.sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):  # an error in the block matters more
            files.remove(partial)


def sync_folders(files: Files, folder: Path) -> None:
    """Make the names in a folder and its subfolders durable."""
    for path in folder.iterdir():
        if is_dir(path) and not is_symlink(path):
            sync_folders(files, path)
    files.sync_folder(folder)


def make_folders(files: Files, path: Path) -> None:
    """Create `path` and its missing parents, and make the new names durable.

    Otherwise a power failure could remove the folder together with files synced in it.
    """
    missing = [folder for folder in (path, *path.parents) if not exists(folder)]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        files.sync_folder(folder.parent)
