"""Makes store requests for other processes on this host: `python -m reprise.stores.child NUMBER MOST_BYTES`.

It ends with the process that started it, which keeps its standard input open.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import IO, Any

from reprise.storage.files import FILE_SYSTEM
from reprise.stores.client import StoreClient
from reprise.stores.ranges import CELL_BYTES, KEPT_BYTES, Version
from reprise.stores.store import is_of_this_user


class Server(StoreClient):
    """Makes all connected processes' calls, and keeps the newest fetched ranges, each in an unnamed file.

    Without room on the disk, it keeps the newest range alone, in memory.

    Args:
        most_bytes: The files' largest size in bytes. It is at most half of the free space in their folder, too.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_bytes, self._lock = min(most_bytes, most_files // 2 * CELL_BYTES), threading.Lock()
        self._ranges: dict[Hashable, Future[IO[bytes]]] = {}
        self._kept = deque[Hashable]()  # the keys of fetched ranges, oldest first

    def open(self, path: Path, version: Version, start: int, size: int) -> IO[bytes]:
        """Return a file with a range's bytes, fetched at its first call.

        Raises:
            OSError: See `read`. The next call fetches a failed range again.
        """
        key, etag = (path, version, start), version[1]
        with self._lock:
            if is_new := key not in self._ranges:
                self._ranges[key] = Future()
            fetched = self._ranges[key]
        if is_new:
            try:
                fetched.set_result(self._keep(key, self.read(path, start, size, etag)))
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

    def run(self, listener: socket.socket) -> None:
        """Answer until this process ends."""
        while True:
            connected, _ = listener.accept()
            if is_of_this_user(connected):
                threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        """Answer each call with its result and its error. A file follows by its descriptor."""
        with contextlib.suppress(OSError, EOFError):  # its process has ended
            connection = Connection(connected.detach())
            while True:
                call, *details = connection.recv()
                result: Any = None
                error: Exception | None = None
                try:
                    result = getattr(self, call)(*details)
                except Exception as failure:  # noqa: BLE001 - the process that asked raises it
                    error = failure
                connection.send((None if call == "open" else result, error))
                if call == "open" and error is None:
                    send_handle(connection, result.fileno(), None)
                del result  # the next call may be long in coming, and the range dropped meanwhile


def main(number: int, most_bytes: int) -> None:
    """Answer on a listening socket, by its number, until the standard input ends."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each kept range is an open file
    listener = socket.socket(fileno=number)
    threading.Thread(target=Server(most_bytes).run, args=(listener,), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # whatever request is under way


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
