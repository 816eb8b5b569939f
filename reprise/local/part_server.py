"""Serves the pieces of a host's local checkpoints to the mirrors of other hosts, and takes the orders of host 0.

A connection carries one request: the token, then a line of JSON. The answer is a line of JSON, and the blocks of the
pieces asked for in the order of the files. Pieces that `host.json` does not list are refused: their ranges are holes.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reprise.errors import TrainerError, UnreadableError
from reprise.format.host_file import HostFile, PieceNumbers, without
from reprise.format.manifest import BLOCK_BYTES
from reprise.format.names import HOST, MANIFEST
from reprise.loading.blocks import PieceBlock, blocks_of
from reprise.loading.reader import Bytes, Checkpoint, open_checkpoint, read_places
from reprise.local.pieces import PieceReader
from reprise.local.survey import PartSummary
from reprise.storage.folder import CheckpointFolder
from reprise.storage.holds import Hold
from reprise.stores.peers import Peers

_log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
MOST_BYTES = 256 << 20  # of a line
_CLOSED = (errno.EBADF, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class HostPart:
    """The part of a checkpoint on this host.

    Args:
        by_writer: the pieces of every host at the save, by its number.
    """

    checkpoint: Checkpoint
    host: HostFile
    summary: PartSummary
    by_writer: Mapping[int, PieceNumbers]


class PartServer:
    """Answers the requests of other hosts, each on a thread of its own.

    Attributes:
        wake: set by an order.
        chosen: iteration and digest of the checkpoint that host 0 has chosen last, which is held here.
        is_over: whether host 0 needs this host no more.
    """

    def __init__(self, folder: CheckpointFolder, peers: Peers, *, timeout_s: float = TIMEOUT_S) -> None:
        self._folder, self._listener, self._timeout_s = folder, peers.listener, timeout_s
        self._token = peers.token.encode()
        self.wake = threading.Event()
        self.chosen: tuple[int, str] | None = None
        self.is_over = False
        self._hold: Hold | None = None
        self._found: tuple[object, HostPart | None] | None = None  # the last one, by its version
        self._lock = threading.RLock()

    def start(self) -> None:
        """Begin to answer."""
        threading.Thread(target=self._accept, name="mirror-accept", daemon=True).start()

    def find(self, iteration: int, digest: str) -> HostPart | None:
        """Return the part of a checkpoint on this host, as its `host.json` is now; None if there is none.

        Args:
            digest: of the manifest.
        """
        path = self._folder.iteration(iteration)
        with self._lock:
            try:
                statuses = [(path / name).stat() for name in (MANIFEST, HOST)]
                version = path, [(status.st_ino, status.st_mtime_ns) for status in statuses]
                if self._found is None or self._found[0] != version:
                    self._found = version, self._read(path)
            except (OSError, UnreadableError) as error:
                _log.debug("%s cannot be read: %s", path, error)
                return None
            part = self._found[1]
            return part if part is not None and part.checkpoint.digest == digest else None

    def _read(self, path: Path) -> HostPart | None:
        """Return the part in a folder; None if it is damaged."""
        try:
            checkpoint = open_checkpoint(path, self._folder.files)
            read_places(checkpoint)
        except UnreadableError:
            raise
        except TrainerError as error:
            _log.error("%s is not uploaded from this host: %s", path, error)
            return None
        host = checkpoint.host
        return None if host is None else HostPart(checkpoint, host, PartSummary.of(host), host.by_writer())

    def hold(self, iteration: int, digest: str) -> HostPart | None:
        """Keep a checkpoint, in place of the one before, and return the part of it here; None if there is none."""
        with self._lock:
            if self.chosen != (iteration, digest) or self._hold is None or not self._hold.is_in_place():
                self.release()
                self._hold = Hold.take(self._folder.iteration(iteration))
            part = None if self._hold is None else self.find(iteration, digest)
            if part is None:
                self.release()
            else:
                self.chosen = iteration, digest
            return part

    def release(self) -> None:
        """Keep no checkpoint."""
        with self._lock:
            self.chosen = None
            if self._hold is not None:
                self._hold.release()
                self._hold = None

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
        connection.settimeout(self._timeout_s)
        with connection, connection.makefile("rb") as lines:
            try:
                if not hmac.compare_digest(lines.read(len(self._token)), self._token):
                    return
                answer, blocks = self._answer(json.loads(lines.readline(MOST_BYTES)))
                connection.sendall(json.dumps(answer).encode() + b"\n")
                for _, data in blocks:
                    connection.sendall(data.data)
            except (OSError, TrainerError, ValueError, KeyError, TypeError) as error:
                _log.debug("a request of another host ended: %s", error)

    def _answer(self, request: dict[str, Any]) -> tuple[dict[str, object], Iterable[tuple[PieceBlock, Bytes]]]:
        order = request["order"]
        if order == "over":
            self.is_over = True
        if order == "release":
            self.release()
        if order in ("over", "release"):
            self.wake.set()
            return {}, ()
        place = int(request["iteration"]), str(request["manifest"])
        part = self.hold(*place) if order == "hold" else self.find(*place)
        if order == "hold":
            self.wake.set()
        if order != "pieces":
            return {"part": None if part is None else part.summary.row()}, ()
        pieces = {str(name): tuple(numbers) for name, numbers in request["pieces"].items()}
        if part is None or without(pieces, part.host.held):
            return {"problem": "this host does not have these pieces"}, ()
        blocks = blocks_of(part.checkpoint, read_places(part.checkpoint), pieces)
        return {}, PieceReader(part.checkpoint).read(blocks, np.empty(BLOCK_BYTES, np.uint8))
