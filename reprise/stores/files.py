"""The files of a store as the engine reads them."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from reprise.storage.files import Files
from reprise.stores.host_cache import CachedObject, HostCache
from reprise.stores.path import StorePath
from reprise.stores.reader import StoreReader, close_readers
from reprise.stores.wire import CONNECTIONS

# Smaller reads are served from windows of this size: the blocks of small tensors lie beside each other, and a request
# costs tens of milliseconds, whatever its size.
WINDOW_BYTES = 256 << 10
_MOST_WINDOWS = 64


@dataclass(frozen=True, slots=True)
class _OpenObject:
    """An object as it was when it was opened; reads are of that version."""

    reader: StoreReader
    key: str
    size: int
    etag: str | None
    cached: CachedObject | None

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from an offset."""
        if self.cached is None:
            self._fetch(buffer, offset)
        else:
            self.cached.read(buffer, offset, self._fetch)

    def _fetch(self, buffer: memoryview, offset: int) -> None:
        self.reader.read(self.key, buffer, offset, self.etag)


class _Windows:
    """The windows read last. Threads in need of the same window wait for the first of them."""

    def __init__(self) -> None:
        self._bodies: dict[tuple[str, str | None, int], Future[bytes]] = {}
        self._lock = threading.Lock()

    def fill(self, file: _OpenObject, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of an object."""
        end = offset + buffer.nbytes
        for number in range(offset // WINDOW_BYTES, -(-end // WINDOW_BYTES)):
            start = number * WINDOW_BYTES
            body = self._body(file, number)
            first, last = max(offset, start), min(end, start + WINDOW_BYTES)
            buffer[first - offset : last - offset] = body[first - start : last - start]

    def _body(self, file: _OpenObject, number: int) -> bytes:
        name = (file.key, file.etag, number)
        with self._lock:
            is_there = name in self._bodies
            future = self._bodies.setdefault(name, Future())
            if len(self._bodies) > _MOST_WINDOWS:
                del self._bodies[next(iter(self._bodies))]
        if not is_there:
            self._read(file, number, future)
        return future.result()

    def _read(self, file: _OpenObject, number: int, future: Future[bytes]) -> None:
        start = number * WINDOW_BYTES
        body = bytearray(min(WINDOW_BYTES, file.size - start))
        try:
            file.fill(memoryview(body), start)
            future.set_result(bytes(body))
        except BaseException as error:
            with self._lock:
                self._bodies.pop((file.key, file.etag, number), None)
            future.set_exception(error)
            raise


class StoreFiles(Files):
    """Reads objects of a store; `Files` of a path in a store. A store is written by an upload alone.

    Args:
        load: the name of a load by several ranks of a host; None where this process reads alone.
    """

    reading_threads = CONNECTIONS

    def __init__(self, load: str | None = None) -> None:
        self._load = load
        self._cache: HostCache | None = None
        self._lock, self._windows = threading.Lock(), _Windows()
        self._numbers = itertools.count()
        self._open: dict[int, _OpenObject] = {}
        self._versions: dict[Path, tuple[int, str | None]] = {}  # that all reads of a load are of

    def size(self, path: Path) -> int:
        return self._version(path)[0]

    def is_folder(self, path: Path) -> bool:
        return True  # the prefix of an object that is there

    def open_for_reading(self, path: Path) -> int:
        """Open the present version of an object; the number returned is no descriptor of the system."""
        assert isinstance(path, StorePath)
        size, etag = self._version(path)
        number = next(self._numbers)
        cached = None if self._load is None else self._host_cache(self._load).open(f"{path.url.key}{etag}", size)
        self._open[number] = _OpenObject(path.reader, path.url.key, size, etag, cached)
        return number

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        file = self._open[descriptor]
        part = buffer.cast("B")[: max(0, file.size - offset)]
        if part.nbytes < WINDOW_BYTES:
            self._windows.fill(file, part, offset)
        else:
            file.fill(part, offset)
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

    def look(self, path: Path) -> None:
        self._versions.pop(path, None)
        self.size(path)

    def end(self) -> None:
        close_readers()
        self._versions.clear()
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
