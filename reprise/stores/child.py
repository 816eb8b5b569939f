"""Makes store requests for other processes on this host: `python -m reprise.stores.child NUMBER MOST_BYTES NICENESS`.

It ends with the process that started it, which keeps its standard input open.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
import traceback
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from reprise.stores.client import StoreClient
from reprise.stores.ranges import KEPT_BYTES, RangeCache
from reprise.stores.store import is_of_this_user
from reprise.stores.url import StoreUrl

_NICE_THREADS = "2"  # of obstore


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

    def answer(self, memory: memoryview, call: str, url: StoreUrl, *details: Any) -> list[Any] | OSError | str:
        """Return a call's result in a list, its OSError, or another error's traceback."""
        try:
            if call != "fill":
                return [getattr(self._client, call)(url, *details)]
            etag, offset, size, request = details
            fetch = partial(self._client.read, url, etag=etag)
            if request is None:
                memory[:size] = fetch(offset, size)
            else:
                self._cache.fill((url, etag), memory[:size], offset, request, fetch)
            return [None]
        except OSError as error:
            return error
        except Exception:  # noqa: BLE001 - the process that asked raises it
            return traceback.format_exc()


def main(number: int, most_bytes: int, niceness: int) -> None:
    """Answer on a listening socket, by its number, until the standard input ends."""
    if niceness:
        os.nice(niceness)
        os.environ["TOKIO_WORKER_THREADS"] = _NICE_THREADS
    listener = socket.socket(fileno=number)
    threading.Thread(target=Server(most_bytes).run, args=(listener,), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # whatever request is under way


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
