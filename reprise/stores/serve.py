"""Answers the requests of another process to one store: `python -m reprise.stores.serve`.

obstore's threads do not survive a fork, and a program may fork after loading a checkpoint, as a DataLoader does. So
the program never imports obstore: this process does. This process ends with the process it was started by.
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
from typing import Any

from reprise.stores.client import StoreClient
from reprise.stores.wire import SLOT_BYTES, Message, receive, send

_LOOK_S = 2.0  # between two looks for the process that has started this one


class Server:
    """The answers to one process.

    Args:
        memory: shared with the other process: `SLOT_BYTES` for the bodies of each connection.
    """

    def __init__(self, client: StoreClient, memory: mmap.mmap) -> None:
        self._client, self._memory = client, memory

    def run(self, connection: socket.socket, slot: int) -> None:
        """Answer requests until the other side closes the connection."""
        with connection, contextlib.suppress(ConnectionError):  # the other side has not taken an answer
            while (request := receive(connection)) is not None:
                send(connection, self._answer(request, slot * SLOT_BYTES))

    def _answer(self, request: Message, start: int) -> Message:
        try:
            return {"result": self._result(request, start)}
        except OSError as error:
            return {"errno": error.errno, "text": error.strerror, "where": error.filename}
        except Exception:  # noqa: BLE001 - the process that asked raises it
            return {"defect": traceback.format_exc()}

    def _result(self, request: Message, start: int) -> Any:
        key = str(request["key"])
        match request["call"]:
            case "read":
                body = self._client.read(key, request["offset"], request["size"], request["etag"])
                self._memory[start : start + body.nbytes] = body
                return body.nbytes
            case "head":
                entry = self._client.head(key)
                return [entry.size, entry.etag, entry.modified_at]
            case "names":
                folders, objects = self._client.names(key)
                return [folders, [entry.key.rpartition("/")[2] for entry in objects]]
            case "objects":
                return [[entry.key, entry.size, entry.modified_at] for entry in self._client.objects(key)]
            case "put":
                self._client.put(key, str(request["text"]).encode())
                return None
            case "delete":
                self._client.delete([key])
                return None
            case _:
                raise ValueError(request)


def main(arguments: list[str]) -> None:
    """Answer on open connections, until the starting process ends.

    Args:
        arguments: JSON: the store's root, the starting process, the descriptor of the shared memory,
            and those of the connections.
    """
    root, parent, memory_descriptor, descriptors = json.loads(arguments[0])
    memory = mmap.mmap(memory_descriptor, SLOT_BYTES * len(descriptors))
    server = Server(StoreClient(root), memory)
    threads = [
        threading.Thread(target=server.run, args=(socket.socket(fileno=descriptor), slot), daemon=True)
        for slot, descriptor in enumerate(descriptors)
    ]
    for thread in threads:
        thread.start()
    while os.getppid() == parent and any(thread.is_alive() for thread in threads):
        threads[0].join(_LOOK_S)
    os._exit(0)  # a request may be under way


if __name__ == "__main__":
    main(sys.argv[1:])
