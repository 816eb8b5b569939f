"""Messages between a process and its reader of a store: a line of JSON each."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]

# The shared memory of a connection, and so the largest request: two blocks of a checkpoint and two cells of the cache
# of a host. With moto's server, requests of 8 MiB took two thirds of the time of those of 4 MiB.
SLOT_BYTES = (8 << 20) + (128 << 10)
CONNECTIONS = 8


def send(connection: socket.socket, message: Message) -> None:
    """Send a message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> Message | None:
    """Return the next message; None where the other side has closed the connection.

    Nothing follows a message before its answer. A buffered file has a lock, which a fork would copy while a thread
    holds it.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        received = connection.recv(1 << 16)
        if not received:
            return None
        data += received
    message: Message = json.loads(data)
    return message
