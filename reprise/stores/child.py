"""Serves store requests for other processes on this host: `python -m reprise.stores.child`.

It ends once no process is connected.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import sys
import threading
import traceback
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from reprise.stores.client import StoreClient
from reprise.stores.ranges import RangeCache
from reprise.stores.store import is_of_this_user
from reprise.stores.url import StoreUrl

_LOOK_MS = 2000  # between two checks for the parent process


class Server:
    """Makes `StoreClient`'s calls for all connected processes."""

    def __init__(self) -> None:
        self._client, self._cache = StoreClient(), RangeCache()

    def run(self, listener: socket.socket, parent: int) -> None:
        """Answer until no process is connected any more, or the parent dies before it connects."""
        poll, links = select.poll(), dict[int, socket.socket]()
        poll.register(listener, select.POLLIN)
        while os.getppid() == parent or links:
            for descriptor, _ in poll.poll(_LOOK_MS):
                if link := links.pop(descriptor, None):  # its process has ended, perhaps while it waits for an answer
                    poll.unregister(link)
                    link.close()
                    if not links:
                        return
                else:
                    connected, _ = listener.accept()
                    if is_of_this_user(connected):
                        links[connected.fileno()] = connected
                        poll.register(connected, select.POLLRDHUP)
                        threading.Thread(target=self._serve, args=(connected.dup(),), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        """Answer a process until it ends."""
        with contextlib.suppress(OSError, EOFError, ValueError):
            memory = memoryview(mmap.mmap(socket.recv_fds(connected, 16, 1)[1][0], 0))
            connection = Connection(connected.detach())
            while True:
                answer = self._answer(memory, *json.loads(connection.recv_bytes()))
                connection.send_bytes(json.dumps(answer).encode())

    def _answer(self, memory: memoryview, call: str, root: str, key: str, *details: Any) -> list[Any]:
        url = StoreUrl(root, key)
        try:
            if call != "fill":
                return [getattr(self._client, call)(url, *details)]
            etag, offset, size, request = details
            fetch = partial(self._client.read, url, etag=etag)
            if request is not None:
                self._cache.fill((url, etag), memory[:size], offset, request, fetch)
            else:
                memory[:size] = fetch(offset, size)
            return [None]
        except OSError as error:
            return ["error", error.errno, error.strerror, str(error.filename)]
        except Exception:  # noqa: BLE001 - the process that asked raises it
            return ["defect", traceback.format_exc()]


if __name__ == "__main__":
    Server().run(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)  # whatever request is under way
