"""The files of a store as the engine reads them."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from reprise.storage.files import Files, Result, T
from reprise.stores.path import StorePath, status_of
from reprise.stores.ranges import SLOT_BYTES, WINDOW_BYTES, Span, requests_of
from reprise.stores.store import CONNECTIONS, child, end_child


@dataclass(frozen=True, slots=True)
class _OpenObject:
    """An object as it was when it was opened; reads are of that version."""

    path: StorePath
    size: int
    etag: str | None
    planned: Sequence[Span]  # the requests to come, in ascending order and apart

    def fill(self, buffer: memoryview, offset: int) -> None:
        at, end, store = offset, offset + buffer.nbytes, self.path.store
        while at < end:
            start, stop = self._request_at(at, end)
            next_at = min(end, stop)
            store.read(self.path.url.key, self.etag, buffer[at - offset : next_at - offset], at, (start, stop))
            at = next_at

    def _request_at(self, at: int, end: int) -> Span:
        index = bisect.bisect_right(self.planned, at, key=lambda request: request[0])
        if index and at < self.planned[index - 1][1]:
            return self.planned[index - 1]
        return at, min(self.size, at + SLOT_BYTES, max(end, at + WINDOW_BYTES))


class StoreFiles(Files):
    """Reads objects of a store; `Files` of a path in a store. A store is written by an upload alone.

    Args:
        load: the name of a load that reads bytes several times, by its ranks or in turn, and fetches them once for
            each host; None where this process reads alone, and once.
    """

    reading_threads = CONNECTIONS

    def __init__(self, load: str | None = None) -> None:
        self._load = load
        self._planned: dict[Path, list[Span]] = {}
        self._numbers = itertools.count()
        self._open: dict[int, _OpenObject] = {}
        self._versions: dict[Path, tuple[int, str | None]] = {}  # that all reads of a load are of

    def size(self, path: Path) -> int:
        return self._version(path)[0]

    def tree(self, path: Path) -> dict[str, os.stat_result]:
        """Return size and time of each object below a folder, in one listing of the store."""
        assert isinstance(path, StorePath)
        return {name: status_of(size, modified_at) for name, size, modified_at in path.objects()}

    def is_folder(self, path: Path) -> bool:
        return True  # the prefix of an object that is there

    def open_for_reading(self, path: Path) -> int:
        """Open the present version of an object; the number returned is no descriptor of the system."""
        assert isinstance(path, StorePath)
        size, etag = self._version(path)
        number = next(self._numbers)
        self._open[number] = _OpenObject(path, size, etag, self._planned.get(path, ()))
        return number

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        file = self._open[descriptor]
        part = buffer.cast("B")[: max(0, file.size - offset)]
        file.fill(part, offset)
        return part.nbytes

    def close(self, descriptor: int) -> None:
        """Close an object opened by `open_for_reading`."""
        del self._open[descriptor]

    def reopen(self, descriptor: int, path: Path) -> None:
        """Take the present version of an object in place of a replaced version."""
        self._versions.pop(path, None)
        self._open[descriptor] = self._open.pop(self.open_for_reading(path))

    def expect(self, reads: Iterable[tuple[Path, int, int]]) -> None:
        """Plan requests for reads, which neighbors share."""
        spans: dict[Path, list[Span]] = {}
        for path, start, end in reads:
            spans.setdefault(path, []).append((start, end))
        self._planned = {path: requests_of(of_file) for path, of_file in spans.items()}

    def map(self, call: Callable[[T], Result], items: Iterable[T]) -> Iterable[Result]:
        """Return the result of a call for each item, of which `CONNECTIONS` are under way at a time."""
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            return list(threads.map(call, items))

    def look(self, path: Path) -> None:
        self._versions.pop(path, None)
        self.size(path)

    def end(self) -> None:
        end_child()
        self._versions.clear()

    def _version(self, path: Path) -> tuple[int, str | None]:
        """Return the size in bytes and the version of an object."""
        assert isinstance(path, StorePath)
        if path not in self._versions:
            child(self._load)
            self._versions[path] = path.store.head(path.url.key)[:2]
        return self._versions[path]
