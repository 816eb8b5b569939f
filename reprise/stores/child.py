"""Makes store requests for other processes on this host: `python -m reprise.stores.child NUMBER MOST_BYTES`.

It ends with the process that started it, which keeps its standard input open.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from reprise.stores.client import StoreClient
from reprise.stores.ranges import KEPT_BYTES, RangeCache
from reprise.stores.store import is_of_this_user
from reprise.stores.url import StoreUrl


class Server:
    """Makes `StoreClient`'s calls for all connected processes.

    Args:
        most_bytes: See `RangeCache`.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._client, self._cache = StoreClient(), RangeCache(most_bytes)

    def run(self, listener: socket.socket) -> None:
        """Answer until this process ends."""
        while True:
            connected, _ = listener.accept()
            if is_of_this_user(connected):
                threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, IndexError):  # its process has ended
            memory = memoryview(mmap.mmap(socket.recv_fds(connected, 16, 1)[1][0], 0))
            connection = Connection(connected.detach())
            while True:
                connection.send(self.answer(memory, *connection.recv()))

    def answer(self, memory: memoryview, call: str, url: StoreUrl, *details: Any) -> list[Any] | Exception:
        """Return a call's result in a list, or its error."""
        try:
            if call != "fill":
                return [getattr(self._client, call)(url, *details)]
            version, start, size, at, count = details
            _, etag, _ = version
            fetch = partial(self._client.read, url, start, size, etag)
            self._cache.fill(memory[:count], (url, version, start), at, fetch)
            return [None]
        except Exception as error:  # noqa: BLE001 - the process that asked raises it
            return error


def main(number: int, most_bytes: int) -> None:
    """Answer on a listening socket, by its number, until the standard input ends."""
    listener = socket.socket(fileno=number)
    threading.Thread(target=Server(most_bytes).run, args=(listener,), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # whatever request is under way


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
