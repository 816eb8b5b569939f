"""Serves the pieces of a host's local checkpoints to the mirrors of other hosts, and takes the orders of host 0.

A connection carries one request: the token, then a line of JSON. The answer is a line of JSON, and the blocks of the
pieces asked for in the order of the files. Pieces that `host.json` does not list are refused: their ranges are holes.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from reprise.errors import TrainerError
from reprise.format.host_file import without
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.blocks import PieceBlock, blocks_of
from reprise.loading.reader import Bytes, read_places
from reprise.local.host_part import HostParts
from reprise.local.pieces import PieceReader
from reprise.stores.peers import Peers

_log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
MOST_BYTES = 256 << 20  # of a line
_CLOSED = (errno.EBADF, errno.EINVAL)
_QUESTIONS = ("part", "pieces")  # all else is an order


class PartServer:
    """Answers the requests of other hosts, each on a thread of its own.

    Attributes:
        wake: set by an order.
        is_over: whether host 0 needs this host no more.
    """

    def __init__(self, parts: HostParts, peers: Peers) -> None:
        self._parts, self._listener, self._token = parts, peers.listener, peers.token.encode()
        self._turn = threading.Lock()  # of the order that is followed
        self.wake = threading.Event()
        self.is_over = False

    def start(self) -> None:
        """Begin to answer."""
        threading.Thread(target=self._accept, name="mirror-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _CLOSED:
                    return
                time.sleep(1.0)  # without a descriptor left
                continue
            threading.Thread(target=self._serve, args=(connection,), name="mirror-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        with connection, connection.makefile("rb") as lines:
            try:
                if not hmac.compare_digest(lines.read(len(self._token)), self._token):
                    return
                request = json.loads(lines.readline(MOST_BYTES))
                is_order = request["order"] not in _QUESTIONS
                turn: AbstractContextManager[object] = self._turn if is_order else nullcontext()
                with turn:
                    if _is_given_up(connection):
                        return
                    answer, blocks = self._answer(request)
                connection.sendall(json.dumps(answer).encode() + b"\n")
                for _, data in blocks:
                    connection.sendall(data.data)
            except (OSError, TrainerError, ValueError, KeyError, TypeError) as error:
                _log.debug("a request of another host ended: %s", error)

    def _answer(self, request: dict[str, Any]) -> tuple[dict[str, object], Iterable[tuple[PieceBlock, Bytes]]]:
        order = request["order"]
        if order == "release":
            self._parts.release()
        if order in ("release", "over"):
            self.is_over = order == "over"
            self.wake.set()
            return {}, ()
        place = int(request["iteration"]), str(request["manifest"])
        try:
            part = self._parts.hold(*place) if order == "hold" else self._parts.find(*place)
        except OSError as error:
            return {"problem": f"{error.filename}: {error.strerror}"}, ()
        if order == "hold":
            self.wake.set()
        if order != "pieces":
            return {"part": None if part is None else part.summary.row()}, ()
        pieces = {str(name): tuple(numbers) for name, numbers in request["pieces"].items()}
        if part is None or without(pieces, part.host.held):
            return {"problem": "this host does not have these pieces"}, ()
        blocks = blocks_of(part.checkpoint, read_places(part.checkpoint), pieces)
        return {}, PieceReader(part.checkpoint).read(blocks, np.empty(BLOCK_BYTES, np.uint8))


def _is_given_up(connection: socket.socket) -> bool:
    """Return whether the other end has closed a connection.

    A request may wait at the port for as long as no mirror is there to answer. Its sender has then asked again, perhaps
    for another checkpoint, and an old order after the new one would undo that.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
