"""Answers the requests of other processes of this host to stores: `python -m reprise.stores.child`.

It ends once no process is connected.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import traceback
from dataclasses import astuple
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from reprise.errors import TrainerError
from reprise.stores.client import StoreClient
from reprise.stores.probe import probe
from reprise.stores.ranges import RangeCache
from reprise.stores.store import is_of_this_user
from reprise.stores.upload import Upload, remove, retried
from reprise.stores.url import StoreUrl

_LOOK_S = 2.0  # between two looks for the process that has started this one


class Server:
    """The answers to all connected processes."""

    def __init__(self) -> None:
        self._cache, self._links, self._lock = RangeCache(), 0, threading.Lock()
        self._client = cache(StoreClient)

    def run(self, listener: socket.socket, parent: int) -> None:
        """Take connections, without end; a parent that has died before it connected ends it."""
        listener.settimeout(_LOOK_S)
        while self._links or os.getppid() == parent:
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                continue
            connected.settimeout(None)
            if is_of_this_user(connected):
                with self._lock:
                    self._links += 1
                threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        try:
            _, [descriptor], _, _ = socket.recv_fds(connected, 16, 1)
            memory, connection = memoryview(mmap.mmap(descriptor, 0)), Connection(connected.detach())
            os.close(descriptor)
            while True:
                call, *arguments = json.loads(connection.recv_bytes())
                if call == "mirror":
                    _mirror(connection, arguments[0])
                connection.send_bytes(json.dumps(self._answer(call, arguments, memory)).encode())
        except (OSError, EOFError, ValueError):  # the other side is gone
            pass
        finally:
            with self._lock:
                self._links -= 1
                if not self._links:
                    os._exit(0)  # a request may be under way

    def _answer(self, call: str, arguments: list[Any], memory: memoryview) -> list[Any]:
        try:
            return [self._result(call, *arguments, memory=memory)]
        except OSError as error:
            return ["error", error.errno, error.strerror, str(error.filename)]
        except TrainerError as error:
            parts = (error.where, error.expected, error.found, error.fix)
            return ["problem", error.what, *(None if part is None else str(part) for part in parts)]
        except Exception:  # noqa: BLE001 - the process that asked raises it
            return ["problem", "A store could not be read", None, None, traceback.format_exc(), None]

    def _result(self, call: str, root: str, key: str, *arguments: Any, memory: memoryview) -> Any:
        client = self._client(root)
        match call, arguments:
            case "fill", (etag, offset, size, request, spills):

                def fetch(start: int, count: int) -> memoryview:
                    return client.read(key, start, count, etag)

                self._cache.fill((root, key, etag), memory[:size], offset, request, fetch, spills=spills)
                return None
            case "fetched", ():
                return self._cache.fetched_bytes
            case "head", ():
                return astuple(client.head(key))
            case "names", ():
                folders, objects = client.names(key)
                return folders, [entry.key.rpartition("/")[2] for entry in objects]
            case "objects", ():
                return [astuple(entry) for entry in client.objects(key)]
            case "begin", (source,):
                return retried(lambda: Upload(client, StoreUrl(root, key), source).begin())
            case "send", (source, name):
                return retried(lambda: Upload(client, StoreUrl(root, key), source).send(name))
            case "commit", (source,):
                return Upload(client, StoreUrl(root, key), source).commit()
            case "remove", ():
                return remove(client, StoreUrl(root, key))
            case "probe", ():
                return [astuple(finding) for finding in probe(StoreUrl(root, key), client)]
            case _:
                raise ValueError(call)


def _mirror(connection: Connection, options: dict[str, Any]) -> None:
    """Mirror a run, and follow the orders of the process that has asked for it until it closes the connection."""
    from reprise.stores import mirror

    orders = mirror.Orders()

    def run() -> None:
        connection.send_bytes(json.dumps(mirror.run(mirror.MirrorOptions(**options), orders)).encode())

    threading.Thread(target=run, daemon=True).start()
    while True:
        orders.is_finishing |= json.loads(connection.recv_bytes()) == "finish"
        orders.wake.set()


if __name__ == "__main__":
    Server().run(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)
