"""Messages between a process and its reader of a store: a line of JSON each."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]

# The shared memory of a connection: a block of a checkpoint, the largest that a load reads at once, and two cells of
# the cache of a host.
SLOT_BYTES = (4 << 20) + (128 << 10)
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
