"""Paths in a store, for code made for folders: names and listings come from the store, and no system call is made."""

from __future__ import annotations

import fnmatch
import itertools
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Any

from reprise.format.names import MANIFEST
from reprise.storage.folder import is_iteration_name
from reprise.storage.paths import exists
from reprise.stores.store import CONNECTIONS, ask
from reprise.stores.url import StoreUrl


class StorePath(PosixPath):
    """A folder or an object of a store.

    The folder of an iteration is there once its manifest is, which is written last. A call of the system with such a
    path is a TypeError.

    Attributes:
        listed: the status, as a listing has it: the store need not be asked again.
    """

    listed: os.stat_result | None = None

    @property
    def url(self) -> StoreUrl:
        """Return the URL of this path."""
        scheme, *names = self.parts
        bucket = [] if scheme == "file:" else names[:1]
        return StoreUrl(f"{scheme}//{''.join(bucket)}", "/".join(names[len(bucket) :]))

    def __str__(self) -> str:
        """Return the URL; nothing for the last of `parents`, which has no part."""
        return str(self.url) if self.parts else ""

    def __fspath__(self) -> str:
        """Raise a TypeError: no file system has this path."""
        raise TypeError(f"{self} lies in a store, not in a file system")

    def absolute(self) -> StorePath:
        """Return the path itself."""
        return self

    def resolve(self, strict: bool = False) -> StorePath:
        """Return the path itself: a store has no links."""
        return self

    def iterdir(self) -> Iterator[StorePath]:  # type: ignore[override]
        """Yield the folders and the objects directly below, and no iteration without a manifest."""
        folders, objects = ask(self.url, "names")
        paths = [self / name for name in folders]
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            is_there = list(threads.map(StorePath._has_manifest, paths))
        for path in itertools.compress(paths, is_there):
            path.listed = _FOLDER
            yield path
        yield from (self / name for name in objects)

    def rglob(self, pattern: str, **_: Any) -> Iterator[StorePath]:  # type: ignore[override]
        """Yield the objects below whose names fit a pattern."""
        for name, status in self.objects():
            path = self / name
            if fnmatch.fnmatchcase(path.name, pattern):
                path.listed = status
                yield path

    def objects(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and status of each object below, in one listing of the store."""
        start = len(self.url.key) + 1 if self.url.key else 0
        for key, size, _, modified_at in ask(self.url, "objects"):
            yield key[start:], _status(size, modified_at)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return kind, size and time of an object, or of the folder of objects below this name.

        Raises:
            OSError: if there is neither, or the store cannot be read.
        """
        if self.listed is None and is_iteration_name(self.name):
            ask((self / MANIFEST).url, "head")
            return _FOLDER
        try:
            return self.listed or _status(*ask(self.url, "head")[1::2])
        except FileNotFoundError:
            if any(ask(self.url, "names")):
                return _FOLDER
            raise

    lstat = stat

    def _has_manifest(self) -> bool:
        return not is_iteration_name(self.name) or exists(self)


def _status(size: int, modified_at: float, mode: int = stat.S_IFREG | 0o444) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, 0, 0, size, *(int(modified_at),) * 3))


_FOLDER = _status(0, 0.0, stat.S_IFDIR | 0o555)


def url_of(path: Path) -> StoreUrl:
    """Return the URL of a path in a store."""
    assert isinstance(path, StorePath)
    return path.url


def store_path(text: str) -> StorePath:
    """Return the path of a URL.

    Raises:
        ConfigError: for a malformed URL.
    """
    url = StoreUrl.parse(text)
    return StorePath(url.root, *url.key.split("/")) if url.key else StorePath(url.root)
