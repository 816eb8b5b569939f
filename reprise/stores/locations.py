"""Paths named by users: in a file system or, as a URL, in a store. Imports store code only for a URL."""

from __future__ import annotations

from pathlib import Path

from reprise.format.names import MANIFEST
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.paths import is_stored as is_stored
from reprise.storage.paths import is_url

ManifestVersion = tuple[object, ...]


def location(text: str | Path) -> Path:
    """Return a text's path: an absolute path on this host, or a store URL.

    Later changes of the working directory have no effect.

    Raises:
        ConfigError: A store URL is malformed, or the URL is not a store's.
    """
    if isinstance(text, Path):
        return text.absolute()
    if not is_url(text):
        return Path(text).absolute()
    from reprise.stores.path import store_path

    return store_path(text)


def files_of(path: Path, files: Files = FILE_SYSTEM, *, load: str | None = None) -> Files:
    """Return the file calls for a path: `files` outside a store, `StoreFiles` in one.

    Args:
        load: The name of a load by several ranks, for `StoreFiles`.
    """
    if not is_stored(path):
        return files
    from reprise.stores.files import StoreFiles

    return StoreFiles(load)


def manifest_version(path: Path) -> ManifestVersion | None:
    """Return a value that identifies the checkpoint at a path without reading it, or None without a checkpoint.

    Raises:
        OSError: The store or the file system fails.
    """
    try:
        status = (path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_size, status.st_mtime, status.st_mtime_ns  # a store may have no ETag
