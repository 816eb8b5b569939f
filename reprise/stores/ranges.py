"""Objects' byte ranges, fetched once for all ranks on a host.

A request takes a store tens of milliseconds, whatever its size. So an object is fetched by cells of a grid: reads of
neighboring tensors share a request, and a cell read by several ranks, or twice by a rank, is fetched once while it is
kept.
"""

from __future__ import annotations

import os
import resource
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
    """The newest fetched ranges of all objects, each in an unnamed file. Several threads may call it.

    Without room on the disk, it keeps the newest range alone, in memory.

    Args:
        most_bytes: The files' largest size in bytes. It is at most half of the free space in their folder, too.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_bytes, self._lock = min(most_bytes, most_files // 2 * CELL_BYTES), threading.Lock()
        self._ranges: dict[Hashable, Future[IO[bytes]]] = {}
        self._kept = deque[Hashable]()  # the keys of fetched ranges, oldest first

    def open(self, key: Hashable, fetch: Callable[[], memoryview]) -> IO[bytes]:
        """Return the file with a range's bytes, which `fetch` returns at its first call.

        Raises:
            OSError: See `fetch`. The next call fetches a failed range again.
        """
        with self._lock:
            if is_new := key not in self._ranges:
                self._ranges[key] = Future()
            fetched = self._ranges[key]
        if is_new:
            try:
                fetched.set_result(self._keep(key, fetch()))
            except Exception as error:  # noqa: BLE001 - raised by all who wait
                with self._lock:
                    del self._ranges[key]
                fetched.set_exception(error)
        return fetched.result()

    def _keep(self, key: Hashable, body: memoryview) -> IO[bytes]:
        """Write a new range to a file, and drop the oldest ranges beyond the room."""
        with self._lock:
            try:
                file = tempfile.TemporaryFile(prefix="reprise-store-")  # noqa: SIM115 - closed once nobody reads it
                FILE_SYSTEM.write(file.fileno(), body, offset=0)
                free = FILE_SYSTEM.free_bytes(Path(tempfile.gettempdir()))
                room = min(self._most_bytes, KEPT_BYTES if free is None else free)
            except OSError:
                file, room = os.fdopen(os.memfd_create("reprise-store"), "r+b"), 0
                FILE_SYSTEM.write(file.fileno(), body, offset=0)
            self._kept.append(key)
            while len(self._kept) > max(1, room // CELL_BYTES):
                del self._ranges[self._kept.popleft()]
            return file
