"""Asks the mirrors of other hosts for their parts of a local checkpoint; see `PartServer`."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np

from reprise.format.host_file import PieceNumbers
from reprise.format.layout import Place
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.blocks import PieceBlock, blocks_of
from reprise.loading.reader import Bytes, Checkpoint
from reprise.local.host_part import HostPart
from reprise.local.part_server import MOST_BYTES, TIMEOUT_S
from reprise.local.survey import PartSummary
from reprise.stores.peers import Peers


class PartClient:
    """The other hosts, seen from host number `host`.

    Args:
        timeout_s: how long a host may be silent.
    """

    def __init__(self, peers: Peers, host: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._addresses, self._token, self._timeout_s = peers.addresses, peers.token, timeout_s
        self.host = host
        self._others = [number for number in range(len(peers.addresses)) if number != host]

    @property
    def hosts(self) -> int:
        """Return the number of all hosts."""
        return len(self._addresses)

    def tell(self, order: str) -> bool:
        """Give all others an order, and return whether all have answered."""
        answers = 0
        for number in self._others:
            with contextlib.suppress(OSError), self._asked(number, {"order": order}):
                answers += 1
        return answers == len(self._others)

    def parts(self, own: HostPart, *, order: str = "part") -> tuple[dict[int, PartSummary], dict[int, OSError]]:
        """Return the parts of a checkpoint by the numbers of their hosts, and the errors of those that do not answer.

        Args:
            own: the part of this host.
            order: "hold" to keep the checkpoint there.
        """
        request = {"order": order, "iteration": own.checkpoint.iteration, "manifest": own.checkpoint.digest}
        parts, silent = {self.host: own.summary}, dict[int, OSError]()
        for number in self._others:
            try:
                with self._asked(number, request) as (answer, _):
                    part = None if answer["part"] is None else PartSummary.from_row(answer["part"])
                    if part is not None and part.division == own.summary.division:
                        parts[number] = part
            except OSError as error:
                silent[number] = error
        return parts, silent

    def pieces(
        self, number: int, checkpoint: Checkpoint, places: Mapping[str, Place], pieces: PieceNumbers
    ) -> Iterator[tuple[PieceBlock, Bytes]]:
        """Yield the blocks of pieces of a host with their bytes, valid until the next. Digests are not checked.

        Raises:
            OSError: if the host ends in the middle, is silent, or does not have them.
        """
        request = {"order": "pieces", "iteration": checkpoint.iteration, "manifest": checkpoint.digest}
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        with self._asked(number, {**request, "pieces": pieces}) as (_, stream):
            for block in blocks_of(checkpoint, places, pieces):
                data = buffer[: block.hi - block.lo]
                if stream.readinto(data.data) != data.nbytes:  # type: ignore[attr-defined]
                    raise OSError(errno.ECONNRESET, "the host ended in the middle of an answer")
                yield block, data

    @contextlib.contextmanager
    def _asked(self, number: int, request: Mapping[str, object]) -> Iterator[tuple[dict[str, Any], IO[bytes]]]:
        """Yield the answer of a host, and the stream of what follows it.

        Raises:
            OSError: naming the host.
        """
        where = ":".join(map(str, self._addresses[number]))
        try:
            with (
                socket.create_connection(self._addresses[number], self._timeout_s) as connection,
                connection.makefile("rb") as stream,
            ):
                connection.sendall(self._token.encode() + json.dumps(request).encode() + b"\n")
                answer = json.loads(stream.readline(MOST_BYTES) or b'{"problem": "the request is refused"}')
                if "problem" in answer:
                    raise OSError(errno.EPROTO, answer["problem"])
                yield answer, stream
        except (ValueError, TypeError, KeyError) as error:
            raise OSError(errno.EPROTO, f"the answer is malformed: {error}", where) from error
        except OSError as error:
            code = error.errno or errno.ETIMEDOUT
            raise OSError(code, error.strerror or "the host does not answer", where) from error
