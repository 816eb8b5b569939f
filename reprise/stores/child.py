"""Serves store requests for other processes on this host: `python -m reprise.stores.child`.

It ends once no process is connected.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
import threading
import traceback
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

from reprise.errors import TrainerError
from reprise.storage.lease import leases
from reprise.storage.worker import Worker
from reprise.stores.client import StoreClient
from reprise.stores.probe import probe
from reprise.stores.ranges import RangeCache
from reprise.stores.store import FINISH, Orders, is_of_this_user
from reprise.stores.upload import Upload, remove, retried
from reprise.stores.url import StoreUrl

_LOOK_S = 2.0  # between two checks for the parent process


class Server:
    """Answers all connected processes."""

    def __init__(self) -> None:
        self._cache, self._links, self._lock = RangeCache(), 0, threading.Lock()
        self._client = cache(StoreClient)

    def run(self, listener: socket.socket, parent: int) -> None:
        """Accept connections forever. Ends if the parent dies before it connects."""
        listener.settimeout(_LOOK_S)
        while self._links or os.getppid() == parent:
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                continue
            if is_of_this_user(connected):
                with self._lock:
                    self._links += 1
                threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        """Answer a process until it ends. Another thread makes its calls, so this one sees its end at once."""
        worker, orders = Worker("answers"), Orders()
        try:
            memory = memoryview(mmap.mmap(socket.recv_fds(connected, 16, 1)[1][0], 0))
            connection = Connection(connected.detach())
            while True:
                call, *details = json.loads(connection.recv_bytes())
                if details:
                    worker.submit(partial(self._answer, connection, memory, orders, call, details))
                else:
                    orders.is_finishing |= call == FINISH
                    orders.wake.set()
        except (OSError, EOFError, ValueError):  # the other side is gone
            pass
        finally:
            with self._lock:
                self._links -= 1
                if not self._links:
                    _end()

    def _answer(
        self, connection: Connection, memory: memoryview, orders: Orders, call: str, details: list[Any]
    ) -> None:
        answer: list[Any]
        try:
            answer = [self._result(call, *details, memory=memory, orders=orders)]
        except OSError as error:
            answer = ["error", error.errno, error.strerror, str(error.filename)]
        except TrainerError as error:
            parts = {name: getattr(error, name) for name in ("where", "expected", "found", "fix")}
            texts = {name: None if part is None else str(part) for name, part in parts.items()}
            answer = ["problem", error.what, texts]
        except Exception:  # noqa: BLE001 - the process that asked raises it
            answer = ["problem", "A store could not be read", {"found": traceback.format_exc()}]
        with contextlib.suppress(OSError):  # `_serve` sees the other side's end
            connection.send_bytes(json.dumps(answer).encode())
        if call == "mirror" and answer != [0]:
            _end()  # the run restarts a mirror that has ended

    def _result(self, call: str, root: str, key: str, *details: Any, memory: memoryview, orders: Orders) -> Any:
        client, url = self._client(root), StoreUrl(root, key)
        match call:
            case "fill":
                etag, offset, size, request, spills = details
                fetch = partial(client.read, key, etag=etag)
                return self._cache.fill((url, etag), memory[:size], offset, request, fetch, spills=spills)
            case "fetched":
                return self._cache.fetched_bytes
            case "head" | "names":
                return getattr(client, call)(key)
            case "objects":
                return list(client.objects(key))
            case "begin" | "send" | "commit":
                source, *names = details
                return retried(lambda: getattr(Upload(client, url, source), call)(*names))
            case "remove":
                return remove(client, url)
            case "probe":
                return list(probe(url, client))
            case "mirror":
                from reprise.stores.mirror import MirrorOptions, run

                return run(MirrorOptions(str(url), **details[0]), orders)
            case _:
                raise ValueError(call)


def _end() -> None:
    """End this process, whatever request is under way."""
    for lease in tuple(leases):  # else the next mirror on another host waits for this one's heartbeat
        lease.release()
    os._exit(0)


if __name__ == "__main__":
    Server().run(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
