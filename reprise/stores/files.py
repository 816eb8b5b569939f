"""The files of a store as the engine reads them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from reprise.storage.files import Files, Result, T
from reprise.stores.host_cache import CachedObject, HostCache
from reprise.stores.path import StorePath, status_of
from reprise.stores.ranges import RangeMemory, Ranges, Request, Span, requests_of
from reprise.stores.reader import StoreReader, close_readers
from reprise.stores.wire import CONNECTIONS


@dataclass(frozen=True, slots=True)
class _OpenObject:
    """An object as it was when it was opened; reads are of that version."""

    reader: StoreReader
    key: str
    size: int
    etag: str | None
    ranges: Ranges
    cached: CachedObject | None

    def fetch(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from an offset, on a host of several ranks through its cache."""
        if self.cached is None:
            self._request(buffer, offset)
        else:
            self.cached.read(buffer, offset, self._request)

    def _request(self, buffer: memoryview, offset: int) -> None:
        self.reader.read(self.key, buffer, offset, self.etag)


class StoreFiles(Files):
    """Reads objects of a store; `Files` of a path in a store. A store is written by an upload alone.

    Args:
        load: the name of a load by several ranks of a host; None where this process reads alone.
    """

    reading_threads = 3 * CONNECTIONS  # neighbors wait for one request

    def __init__(self, load: str | None = None) -> None:
        self._load = load
        self._cache: HostCache | None = None
        self._lock, self._memory = threading.Lock(), RangeMemory()
        self._ranges: dict[tuple[Path, str | None], Ranges] = {}
        self._planned: dict[Path, list[Request]] = {}
        self._numbers = itertools.count()
        self._open: dict[int, _OpenObject] = {}
        self._versions: dict[Path, tuple[int, str | None]] = {}  # that all reads of a load are of

    def size(self, path: Path) -> int:
        return self._version(path)[0]

    def tree(self, path: Path) -> dict[str, os.stat_result]:
        """Return size and time of each object below a folder, in one listing of the store."""
        assert isinstance(path, StorePath)
        key = path.url.key
        start = len(key) + 1 if key else 0
        return {name[start:]: status_of(*details) for name, *details in path.reader.ask("objects", key)}

    def is_folder(self, path: Path) -> bool:
        return True  # the prefix of an object that is there

    def open_for_reading(self, path: Path) -> int:
        """Open the present version of an object; the number returned is no descriptor of the system."""
        assert isinstance(path, StorePath)
        size, etag = self._version(path)
        number = next(self._numbers)
        cached = None if self._load is None else self._host_cache(self._load).open(f"{path.url.key}{etag}", size)
        with self._lock:
            ranges = self._ranges.setdefault((path, etag), Ranges(size, self._memory))
            ranges.planned = self._planned.get(path, ())
        self._open[number] = _OpenObject(path.reader, path.url.key, size, etag, ranges, cached)
        return number

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        file = self._open[descriptor]
        part = buffer.cast("B")[: max(0, file.size - offset)]
        file.ranges.fill(part, offset, file.fetch)
        return part.nbytes

    def close(self, descriptor: int) -> None:
        """Close an object opened by `open_for_reading`."""
        cached = self._open.pop(descriptor).cached
        if cached is not None:
            cached.close()

    def reopen(self, descriptor: int, path: Path) -> None:
        """Take the present version of an object in place of a replaced version."""
        self._versions.pop(path, None)
        number = self.open_for_reading(path)
        self.close(descriptor)
        self._open[descriptor] = self._open.pop(number)

    def expect(self, reads: Iterable[tuple[Path, int, int]]) -> None:
        """Plan requests for reads, which neighbors share."""
        spans: dict[Path, list[Span]] = {}
        for path, start, end in reads:
            spans.setdefault(path, []).append((start, end))
        self._planned = {path: list(requests_of(of_file)) for path, of_file in spans.items()}

    def map(self, call: Callable[[T], Result], items: Iterable[T]) -> Iterable[Result]:
        """Return the result of a call for each item, of which `CONNECTIONS` are under way at a time."""
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            return list(threads.map(call, items))

    def look(self, path: Path) -> None:
        self._versions.pop(path, None)
        self.size(path)

    def end(self) -> None:
        close_readers()
        self._versions.clear()
        self._ranges.clear()
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _version(self, path: Path) -> tuple[int, str | None]:
        """Return the size in bytes and the version of an object."""
        assert isinstance(path, StorePath)
        if path not in self._versions:
            self._versions[path] = path.reader.head(path.url.key)[:2]
        return self._versions[path]

    def _host_cache(self, load: str) -> HostCache:
        with self._lock:
            if self._cache is None:
                self._cache = HostCache(load)
            return self._cache
