"""Objects' byte ranges, fetched once for all ranks on a host.

A request takes a store tens of milliseconds, whatever its size. So an object is fetched by cells of a grid: reads of
neighboring tensors share a request, and a cell read by several ranks, or twice by a rank, is fetched once while it is
kept.
"""

from __future__ import annotations

import errno
import functools
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from reprise.storage.files import FILE_SYSTEM

# With moto's server, 8 MiB requests took two thirds of the time of 4 MiB ones.
CELL_BYTES = 8 << 20
# The first cell: a file's header, and its first small tensors.
FIRST_CELL_BYTES = 64 << 10
# How much a process that reads alone keeps: it rarely reads a cell again.
KEPT_BYTES = 512 << 20


def cell_at(at: int, size: int) -> tuple[int, int]:
    """Return the first byte and the end of the cell containing the byte `at`, in an object with `size` bytes."""
    start = at - (at - FIRST_CELL_BYTES) % CELL_BYTES if at >= FIRST_CELL_BYTES else 0
    return start, min(size, start + CELL_BYTES if start else FIRST_CELL_BYTES)


class RangeCache:
    """The newest fetched ranges of all objects, each in a cell of an unnamed file. Several threads may call it.

    Without room there, it keeps the newest range in memory.

    Args:
        most_bytes: The file's largest size in bytes. It is at most half of the free space in its folder, too.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes, self._lock = most_bytes, threading.Lock()
        # Where ranges begin in the file, by key. For the one in memory, its bytes.
        self._places: dict[Hashable, Future[int | memoryview]] = {}
        self._kept = deque[Hashable]()  # the file's ranges, oldest first
        self._count = 0  # of ranges that were written there
        self._in_memory: Hashable = None

    def fill(self, buffer: memoryview, key: Hashable, at: int, fetch: Callable[[], memoryview]) -> None:
        """Fill a buffer with a range's bytes from `at` on.

        Args:
            fetch: Returns the whole range.

        Raises:
            OSError: See `fetch`. The next read fetches a failed range again.
        """
        while True:
            with self._lock:
                place = self._places.get(key)
                if is_new := place is None:
                    place = self._places[key] = Future()
            if is_new:
                self._fetch(key, place, fetch)
            result = place.result()
            if isinstance(result, memoryview):
                buffer[:] = result[at : at + buffer.nbytes]
                return
            file, _ = self._cells
            if FILE_SYSTEM.read(file.fileno(), buffer, offset=result + at) != buffer.nbytes:
                raise OSError(errno.EIO, "a file of fetched bytes ends early", str(file.name))
            with self._lock:
                if self._places.get(key) is place:  # otherwise a newer range may have taken its place meanwhile
                    return

    def _fetch(self, key: Hashable, place: Future[int | memoryview], fetch: Callable[[], memoryview]) -> None:
        """Fetch a new range, and keep it for all who wait for it."""
        try:
            place.set_result(self._keep(key, fetch()))
        except Exception as error:  # noqa: BLE001 - raised by all who wait
            with self._lock:
                del self._places[key]
            place.set_exception(error)

    def _keep(self, key: Hashable, body: memoryview) -> int | memoryview:
        """Write a range over the oldest one, and return where it begins in the file. Without room, return it."""
        with self._lock:
            try:
                file, most = self._cells
                if not most:
                    raise OSError(errno.ENOSPC, "no room for a range", str(file.name))
                if len(self._kept) == most:
                    del self._places[self._kept.popleft()]
                start = self._count % most * CELL_BYTES
                FILE_SYSTEM.write(file.fileno(), body, offset=start)
            except OSError:
                self._places.pop(self._in_memory, None)
                self._in_memory = key
                return body
            self._kept.append(key)
            self._count += 1
            return start

    @functools.cached_property
    def _cells(self) -> tuple[IO[bytes], int]:
        """Return the file, and how many cells it may have."""
        file = tempfile.TemporaryFile(prefix="reprise-store-")  # noqa: SIM115 - for this process
        free = FILE_SYSTEM.free_bytes(Path(tempfile.gettempdir()))
        most = min(self._most_bytes, KEPT_BYTES if free is None else free // 2) // CELL_BYTES
        return file, most
