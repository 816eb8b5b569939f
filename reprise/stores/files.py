"""Store objects as the engine's files."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reprise.storage.files import Files, Result, T
from reprise.stores.path import status_of
from reprise.stores.ranges import CELL_BYTES, Version, cell_at
from reprise.stores.store import CHILD, CHILD_CLIENT, CONNECTIONS


class StoreFiles(Files):
    """Reads objects in a store through the `Files` interface. Only an upload writes to a store.

    Args:
        load: The name of a load that reads bytes several times, on several ranks or in turn, and fetches them once per
            host. None if this process alone reads them, once.
    """

    reading_threads = CONNECTIONS
    step_bytes = CELL_BYTES  # a whole block: without room for a cell, each read fetches it again

    def __init__(self, load: str | None = None) -> None:
        self._load = load
        self._numbers = itertools.count()
        self._open: dict[int, Path] = {}
        self._versions: dict[Path, Version] = {}  # for all reads in a load, until an object is reopened

    def size(self, path: Path) -> int:
        return self._version(path)[0]

    def tree(self, path: Path, folders: object = None) -> dict[str, os.stat_result]:
        """Return each object's size and time below a folder, from a single store listing of all its folders."""
        objects = CHILD_CLIENT.objects(path)
        return {name: status_of(size, None, modified_at) for name, (size, modified_at) in objects.items()}

    def open_for_reading(self, path: Path) -> int:
        """Open an object. The returned number is not a system descriptor."""
        number = next(self._numbers)
        self._version(path)  # raises if there is no object
        self._open[number] = path
        return number

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        path = self._open[descriptor]
        version = self._version(path)
        size = version[0]
        part, at, end = buffer.cast("B"), offset, min(size, offset + buffer.nbytes)
        while at < end:
            start, stop = cell_at(at, size)
            into = part[at - offset : min(end, stop) - offset]
            fetched = CHILD.ask("open", path, version, start, stop - start)
            try:
                if super().read(fetched, into, offset=at - start) != into.nbytes:
                    raise OSError(errno.EIO, "a file of fetched bytes ends early", str(path))
            finally:
                os.close(fetched)
            at += into.nbytes
        return max(0, end - offset)

    def close(self, descriptor: int) -> None:
        """Close an object opened by `open_for_reading`."""
        del self._open[descriptor]

    def reopen(self, descriptor: int, path: Path) -> None:
        """Switch to an object's current version if it was replaced."""
        self._versions.pop(path, None)

    def map(self, call: Callable[[T], Result], items: Iterable[T]) -> Iterable[Result]:
        """Return the call's result for each item, with `CONNECTIONS` calls under way at a time."""
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            return list(threads.map(call, items))

    def end(self) -> None:
        CHILD.end()
        self._versions.clear()

    def _version(self, path: Path) -> Version:
        version = self._versions.get(path)  # looked up once: another thread may reopen the object meanwhile
        if version is None:
            if self._load is not None:
                CHILD.share(self._load)
            version = self._versions[path] = CHILD_CLIENT.head(path)
        return version
