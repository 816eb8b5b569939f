"""What the ranks of a host read of a store, read once: a folder for the time of a load.

Each object has a sparse file and a map with a byte for each cell of it. A rank locks its cells, fetches the
missing ones, and marks them. The death of a rank frees its locks; marked cells are written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from reprise.paths import matching

CELL_BYTES = 64 << 10  # a read that begins or ends within a cell fetches up to this much more
_PREFIX = f"reprise-store-{os.getuid()}-"
_USERS = "users.lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)

Fetch = Callable[[memoryview, int], None]  # fills a buffer from an offset in the object


class HostCache:
    """The folder of one load on one host.

    Args:
        name: of the load, the same on all ranks, and used for no other.
        root: the folder for temporary files by default.
    """

    def __init__(self, name: str, root: Path | None = None) -> None:
        root = root or Path(tempfile.gettempdir())
        self.folder = root / f"{_PREFIX}{name}"
        _sweep(root, self.folder)
        self._users = _join(self.folder)

    def open(self, key: str, size: int) -> CachedObject:
        """Return an object of a size in bytes."""
        return CachedObject(self.folder, xxhash.xxh3_128_hexdigest(key.encode()), size)  # keys are longer than names

    def close(self) -> None:
        """Leave the folder; the last rank of the host to do so removes the folder."""
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.folder, ignore_errors=True)
        except BlockingIOError:  # another rank reads
            pass
        finally:
            os.close(self._users)


class CachedObject:
    """An object of a store in the cache, open for one thread, whose locks are its own."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self._size = size
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with contextlib.ExitStack() as on_error:
            self._data = os.open(folder / f"{name}.data", flags, 0o600)
            on_error.callback(os.close, self._data)
            self._map = os.open(folder / f"{name}.map", flags, 0o600)
            on_error.pop_all()

    def read(self, buffer: memoryview, offset: int, fetch: Fetch) -> None:
        """Fill a buffer from an offset, and fetch what no rank has fetched yet.

        Raises:
            OSError: as `fetch`. A disk without room is no error: the bytes are then fetched for this rank alone.
        """
        cells = range(offset // CELL_BYTES, -(-(offset + buffer.nbytes) // CELL_BYTES))
        try:
            with self._locked(cells):
                for missing in self._missing(cells):
                    self._fetch(missing, fetch)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            fetch(buffer, offset)
            return
        count = 0
        while count < buffer.nbytes:
            count += os.preadv(self._data, [buffer[count:]], offset + count)

    def close(self) -> None:
        """Close the files."""
        os.close(self._data)
        os.close(self._map)

    def _fetch(self, cells: range, fetch: Fetch) -> None:
        start, end = cells.start * CELL_BYTES, min(cells.stop * CELL_BYTES, self._size)
        body = memoryview(np.empty(end - start, np.uint8))  # type: ignore[arg-type]
        fetch(body, start)
        count = 0
        while count < body.nbytes:
            count += os.pwritev(self._data, [body[count:]], start + count)
        os.pwrite(self._map, b"\1" * len(cells), cells.start)

    def _missing(self, cells: range) -> Iterator[range]:
        """Yield the ranges of missing cells."""
        marks = os.pread(self._map, len(cells), cells.start).ljust(len(cells), b"\0")
        for mark, group in itertools.groupby(cells, key=lambda cell: marks[cell - cells.start]):
            numbers = list(group)
            if not mark:
                yield range(numbers[0], numbers[-1] + 1)

    @contextlib.contextmanager
    def _locked(self, cells: range) -> Iterator[None]:
        self._lock(fcntl.F_WRLCK, cells)
        try:
            yield
        finally:
            self._lock(fcntl.F_UNLCK, cells)

    def _lock(self, kind: int, cells: range) -> None:
        request = struct.pack("hhqqi", kind, os.SEEK_SET, cells.start, len(cells), 0)
        fcntl.fcntl(self._map, fcntl.F_OFD_SETLKW, request)


def _join(folder: Path) -> int:
    """Return the descriptor of the lock that keeps a folder; create the folder where there is none.

    The sweep of another load may remove a new folder before this process has its lock.
    """
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            users = os.open(folder / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(users, fcntl.LOCK_SH)
            if os.fstat(users).st_nlink:
                return users
            os.close(users)


def _sweep(root: Path, current: Path) -> None:
    """Remove the folders of killed loads, other than that of this load."""
    folders = list[Path]()
    with contextlib.suppress(OSError):  # the folder of all users' temporary files may show no names
        folders = matching(root, f"{_PREFIX}*")
    for folder in folders:
        if folder == current:
            continue
        with contextlib.suppress(OSError):
            users = os.open(folder / _USERS, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(users)
