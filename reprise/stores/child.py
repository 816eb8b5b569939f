"""Makes store requests for other processes on this host: `python -m reprise.stores.child NUMBER MOST_BYTES`.

It ends with the process that started it, which keeps its standard input open.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import IO, Any

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
        with contextlib.suppress(OSError, EOFError):  # its process has ended
            connection = Connection(connected.detach())
            while True:
                answer, file = self.answer(*connection.recv())
                connection.send(answer)
                if file is not None:
                    send_handle(connection, file.fileno(), None)

    def answer(self, call: str, url: StoreUrl, *details: Any) -> tuple[list[Any] | Exception, IO[bytes] | None]:
        """Return a call's result in a list, or its error, and for `open` the file with a range's bytes."""
        try:
            if call != "open":
                return [getattr(self._client, call)(url, *details)], None
            version, start, size = details
            _, etag, _ = version
            fetch = partial(self._client.read, url, start, size, etag)
            return [None], self._cache.open((url, version, start), fetch)
        except Exception as error:  # noqa: BLE001 - the process that asked raises it
            return error, None


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
