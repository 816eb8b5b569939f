"""The path named by a user: in a file system or, as a URL, in a store. Loads what stores need only for a URL."""

from __future__ import annotations

from pathlib import Path

from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.paths import is_stored as is_stored
from reprise.storage.paths import is_url


def location(text: str | Path) -> Path:
    """Return the path in a text: an absolute path of this host, or the URL of a store.

    A later change of the working folder changes nothing.

    Raises:
        ConfigError: for a malformed URL of a store, or a URL of something else.
    """
    if isinstance(text, Path):
        return text.absolute()
    if not is_url(text):
        return Path(text).absolute()
    from reprise.stores.path import store_path

    return store_path(text)


def files_of(path: Path, files: Files = FILE_SYSTEM, *, load: str | None = None) -> Files:
    """Return the calls to read a path: `files`, by default those of the file system, outside a store.

    Args:
        load: the name of a load of several ranks, for `StoreFiles`.
    """
    if not is_stored(path):
        return files
    from reprise.stores.files import StoreFiles

    return StoreFiles(load)
