"""Paths in a store, for code written for folders: names and listings come from the store, without system calls."""

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
    """A folder or object in a store.

    An iteration's folder exists once its manifest does, which is written last. A system call with such a path raises
    TypeError.

    Attributes:
        listed: The status from a listing, which saves another request.
    """

    listed: os.stat_result | None = None

    @property
    def url(self) -> StoreUrl:
        """Return this path's URL."""
        scheme, *names = self.parts
        bucket = [] if scheme == "file:" else names[:1]
        return StoreUrl(f"{scheme}//{''.join(bucket)}", "/".join(names[len(bucket) :]))

    def __str__(self) -> str:
        """Return the URL. Empty for the last of `parents`, which has no parts."""
        return str(self.url) if self.parts else ""

    def __fspath__(self) -> str:
        """Raise TypeError: no file system has this path."""
        raise TypeError(f"{self} is in a store, not in a file system")

    def absolute(self) -> StorePath:
        """Return the path itself."""
        return self

    def resolve(self, strict: bool = False) -> StorePath:
        """Return the path itself: a store has no links."""
        return self

    def iterdir(self) -> Iterator[StorePath]:  # type: ignore[override]
        """Yield the folders and objects directly below, skipping iterations without a manifest."""
        folders, objects = ask(self.url, "names")
        paths = [self / name for name in folders]
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            is_there = list(threads.map(StorePath._has_manifest, paths))
        for path in itertools.compress(paths, is_there):
            path.listed = _FOLDER
            yield path
        yield from (self / name for name in objects)

    def rglob(self, pattern: str, **_: Any) -> Iterator[StorePath]:  # type: ignore[override]
        """Yield the objects below whose names match a pattern."""
        for name, status in self.objects():
            path = self / name
            if fnmatch.fnmatchcase(path.name, pattern):
                path.listed = status
                yield path

    def objects(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield each object's name and status below this path, from a single store listing."""
        start = len(self.url.key) + 1 if self.url.key else 0
        for key, size, _, modified_at in ask(self.url, "objects"):
            yield key[start:], _status(size, modified_at)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the kind, size and time for an object, or for a folder with objects below this name.

        Raises:
            OSError: There is neither, or the store cannot be read.
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
    """Return the URL for a path in a store."""
    assert isinstance(path, StorePath)
    return path.url


def store_path(text: str) -> StorePath:
    """Return the path for a URL.

    Raises:
        ConfigError: The URL is malformed.
    """
    url = StoreUrl.parse(text)
    return StorePath(url.root, *url.key.split("/")) if url.key else StorePath(url.root)
