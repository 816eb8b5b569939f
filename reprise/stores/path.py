"""Paths in a store, for code written for folders: names and listings come from the store, without system calls."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PosixPath
from typing import TypeVar

from reprise.errors import ConfigError
from reprise.format.names import MANIFEST
from reprise.storage.folder import WEIGHTS, is_iteration_name
from reprise.stores.store import CHILD_CLIENT, CONNECTIONS
from reprise.stores.url import FILE_STORE, place_of

T = TypeVar("T")

_SEGMENT = r"(?!\.{1,2}(?:/|$)) [^/?#]+"
_URL = re.compile(
    rf"""
    (?: (?P<scheme>s3|gs|az) :// (?P<bucket>[a-z0-9][a-z0-9._-]{{1,254}}) (?:/|$)
      | file:// (?![^/]*[@:]) /* )
    (?P<key> (?: {_SEGMENT} (?: /{_SEGMENT} )* )? ) /*
    """,
    re.IGNORECASE | re.VERBOSE,
)


class StorePath(PosixPath):
    """A folder or object in a store.

    An iteration's folder exists once its manifest does, which is written last. A system call with such a path raises
    TypeError.

    Attributes:
        is_listed_folder: Whether a listing has just shown that this is a folder, which saves another request.
    """

    is_listed_folder = False

    def __str__(self) -> str:
        """Return the URL. Empty for the last of `parents`, which has no parts."""
        return "/".join(filter(None, place_of(self))) if self.parts else ""

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
        is_folder = CHILD_CLIENT.names(self)
        paths = [self / name for name in sorted(is_folder)]
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            is_there = [*threads.map(lambda path: not is_iteration_name(path.name) or path.exists(), paths)]
        for path in itertools.compress(paths, is_there):
            path.is_listed_folder = is_folder[path.name]
            yield path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the kind, size and time for an object, or for a folder with objects below this name.

        Raises:
            OSError: There is neither, or the store cannot be read.
        """
        if self.is_listed_folder:
            return _FOLDER
        try:
            if not is_iteration_name(self.name):
                return status_of(*CHILD_CLIENT.head(self))
            CHILD_CLIENT.head(self / MANIFEST)
        except FileNotFoundError:
            if is_iteration_name(self.name) or not CHILD_CLIENT.names(self):
                raise
        return _FOLDER

    lstat = stat


def status_of(size: int, etag: str | None, modified_at: float, mode: int = stat.S_IFREG | 0o444) -> os.stat_result:
    """Return a status whose inode number is, within this process, that of the version."""
    return os.stat_result((mode, hash(etag), 0, 1, 0, 0, size, *(int(modified_at),) * 3))


_FOLDER = status_of(0, None, 0.0, stat.S_IFDIR | 0o555)


def by_checkpoint(objects: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return a run's objects by checkpoint, then by file name."""
    trees: dict[str, dict[str, T]] = defaultdict(dict)
    for name, value in objects.items():
        folder, _, file = name.removeprefix(f"{WEIGHTS}/").partition("/")
        if file and is_iteration_name(folder):
            trees[name.removesuffix(f"/{file}")][file] = value
    return trees


def store_path(text: str) -> StorePath:
    """Return the path for a URL.

    Raises:
        ConfigError: The URL has another scheme, no bucket, a user and password, a query, or a key with `.`, `..` or an
            empty segment.
    """
    match = _URL.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            "This is not a store URL",
            expected="s3://bucket/folder, gs://, az:// or file:///folder, without a user, a query, an empty segment, "
            "`.` or `..`",
            found=_without_secret(text),
            fix="Put credentials in environment variables, such as AWS_ACCESS_KEY_ID, or in the store's credential "
            "files. For a mounted file system, use a path. Download a hub's folder first: `hf download`.",
        )
    return StorePath(f"{match['scheme'].lower()}://{match['bucket']}" if match["scheme"] else FILE_STORE, match["key"])


def _without_secret(text: str) -> str:
    """Return a URL without a possible user, password or signature."""
    head, _, tail = text.partition("://")
    return re.sub(r"[?#].*", "?...", f"{head}://{re.sub(r'^[^/]*:.*@|^[^/]*@', '...@', tail)}") if tail else text
