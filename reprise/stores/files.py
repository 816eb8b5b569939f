"""The files of a store as the engine reads them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from reprise.storage.files import Files
from reprise.stores.path import StorePath
from reprise.stores.reader import StoreReader, close_readers
from reprise.stores.wire import CONNECTIONS


@dataclass(frozen=True, slots=True)
class _OpenObject:
    """An object as it was when it was opened; reads are of that version."""

    reader: StoreReader
    key: str
    size: int
    etag: str | None


class StoreFiles(Files):
    """Reads objects of a store; `Files` of a path in a store. A store is written by an upload alone."""

    reading_threads = CONNECTIONS

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, _OpenObject] = {}

    def size(self, path: Path) -> int:
        assert isinstance(path, StorePath)
        return path.reader.head(path.url.key)[0]

    def is_folder(self, path: Path) -> bool:
        return True  # the prefix of an object that is there

    def open_for_reading(self, path: Path) -> int:
        """Open the present version of an object; the number returned is no descriptor of the system."""
        assert isinstance(path, StorePath)
        size, etag, _ = path.reader.head(path.url.key)
        number = next(self._numbers)
        self._open[number] = _OpenObject(path.reader, path.url.key, size, etag)
        return number

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        file = self._open[descriptor]
        part = buffer.cast("B")[: max(0, file.size - offset)]
        file.reader.read(file.key, part, offset, file.etag)
        return part.nbytes

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]

    def reopen(self, descriptor: int, path: Path) -> None:
        """Take the present version of an object in place of one that was replaced."""
        number = self.open_for_reading(path)
        self._open[descriptor] = self._open.pop(number)

    def look(self, path: Path) -> None:
        self.size(path)

    def end(self) -> None:
        close_readers()
