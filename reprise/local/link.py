"""Moves pieces between two hosts over torch's point to point, on a process group of two of its own.

Training's collectives are not touched: a broken or slow link delays nothing but its pieces.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reprise.errors import LaunchError
from reprise.format.host_file import PieceNumbers
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.reader import Bytes, Checkpoint
from reprise.local.pieces import PieceWriter, piece_blocks, read_blocks
from reprise.ranks.channel import StoreChannel

_TAG = 0


class Link:
    """A direction between two leaders, opened on both at the same time; use it on a single thread.

    Args:
        name: of the link, new on this channel and equal on both sides.
        sends: whether this is the sending side.
        timeout_s: how long a side waits for the other.

    Raises:
        LaunchError: if the other side does not open it in time.
    """

    def __init__(self, channel: StoreChannel, name: str, *, sends: bool, timeout_s: float) -> None:
        self._name = name
        self._peer = 1 if sends else 0
        timeout = timedelta(seconds=timeout_s)
        self._group: Any = None  # torch's stub of ProcessGroupGloo lacks `send` and `recv`
        with self._named():
            self._group = dist.ProcessGroupGloo(channel.store(f"link/{name}", timeout_s), 1 - self._peer, 2, timeout)

    def close(self) -> None:
        """Close the connection: the other side then waits no longer."""
        self._group = None

    def send(self, checkpoint: Checkpoint) -> int:
        """Send the pieces that the other side asks for, and return their bytes.

        Raises:
            LaunchError: if the other side is gone, or has another checkpoint.
        """
        total = 0
        with self._named():
            size = np.zeros(1, np.int64)
            self._take(size.view(np.uint8))
            request = np.empty(size[0], np.uint8)
            self._take(request)
            digest, pieces = json.loads(request.tobytes())
            if digest != checkpoint.digest:
                raise LaunchError("Two hosts have two checkpoints of an iteration", where=self._name, found=digest)
            for _, data in read_blocks(checkpoint, piece_blocks(checkpoint, pieces)):
                self._put(data)
                total += data.nbytes
        return total

    def receive(self, writer: PieceWriter, checkpoint: Checkpoint, pieces: PieceNumbers) -> None:
        """Ask for pieces, check their digests, and write those with the right digest.

        Raises:
            LaunchError: if the other side is gone, or has another checkpoint.
            OSError: if the disk fails.
        """
        request = np.frombuffer(bytearray(json.dumps([checkpoint.digest, pieces]).encode()), np.uint8)
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        with self._named():
            self._put(np.array([request.size], np.int64).view(np.uint8))
            self._put(request)
            for block in piece_blocks(checkpoint, pieces):
                data = buffer[: block.hi - block.lo]
                self._take(data)
                writer.write(block, data)

    def _put(self, data: Bytes) -> None:
        self._group.send([torch.from_numpy(data)], self._peer, _TAG).wait()

    def _take(self, data: Bytes) -> None:
        self._group.recv([torch.from_numpy(data)], self._peer, _TAG).wait()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name this link in the error of a connection."""
        try:
            yield
        except (AttributeError, RuntimeError, ValueError) as error:  # the first after `close` by another thread
            reason = str(error).splitlines()[0].split("] ")[-1]
            raise LaunchError("A link between two hosts failed", where=self._name, found=reason) from error
