"""Paths in a store, for code made for folders: names and listings come from the store, and no system call is made."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Any

from reprise.format.names import MANIFEST
from reprise.storage.folder import is_iteration_name
from reprise.stores.store import CONNECTIONS, ask
from reprise.stores.url import StoreUrl


class StorePath(PosixPath):
    """A folder or an object of a store.

    The folder of an iteration is there once its manifest is, which is written last. A call of the system with such a
    path is a TypeError.

    Attributes:
        is_listed_folder: whether it is a folder of a listing: the store need not be asked again.
        listed: the size in bytes and the time of an object of a listing.
    """

    is_listed_folder = False
    listed: tuple[int, float] | None = None

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

    def is_symlink(self) -> bool:
        """Return False: a store has no links."""
        return False

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.lstat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether there are objects below this name; below an iteration's, the manifest."""
        if is_iteration_name(self.name) and not self.is_listed_folder:
            return (self / MANIFEST).is_file()
        try:
            return self.is_listed_folder or any(ask(self.url, "names"))
        except FileNotFoundError:  # no such bucket
            return False

    def exists(self, **_: Any) -> bool:
        """Return whether there is an object or a folder of this name."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[StorePath]:  # type: ignore[override]
        """Yield the folders and the objects directly below, and no iteration without a manifest."""
        folders, objects = ask(self.url, "names")
        paths = [self / name for name in folders]
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            for path, is_there in zip(paths, threads.map(StorePath.is_dir, paths), strict=True):
                path.is_listed_folder = is_there
        return iter([*(path for path in paths if path.is_listed_folder), *(self / name for name in objects)])

    def rglob(self, pattern: str, **_: Any) -> Iterator[StorePath]:  # type: ignore[override]
        """Yield the objects below whose names fit a pattern."""
        for name, size, modified_at in self.objects():
            if fnmatch.fnmatchcase(name.rpartition("/")[2], pattern):
                path = self / name
                path.listed = size, modified_at
                yield path

    def objects(self) -> Iterator[tuple[str, int, float]]:
        """Yield name, size and time of each object below, in one listing of the store."""
        start = len(self.url.key) + 1 if self.url.key else 0
        for key, size, _, modified_at in ask(self.url, "objects"):
            yield key[start:], size, modified_at

    def lstat(self) -> os.stat_result:
        """Return size and time of an object.

        Raises:
            OSError: if there is none, or the store cannot be read.
        """
        return status_of(*(self.listed or ask(self.url, "head")[1::2]))

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the same as `lstat`."""
        return self.lstat()


def status_of(size: int, modified_at: float) -> os.stat_result:
    """Return size and time of an object in the form of a file's."""
    return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, size, *(int(modified_at),) * 3))


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
