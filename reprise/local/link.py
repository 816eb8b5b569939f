"""Moves pieces between two hosts by torch's point-to-point calls, on a separate process group with two ranks.

Training's collectives are not touched: a broken or slow link delays only its pieces.
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
from reprise.loading.blocks import blocks_of
from reprise.loading.reader import Bytes, Checkpoint
from reprise.local.pieces import PieceWriter, read_blocks
from reprise.ranks.channel import StoreChannel

_TAG = 0


class Link:
    """One direction between two leaders, opened on both at the same time. Use it from a single thread.

    Args:
        name: The link's name, new on this channel and equal on both sides.
        sends: Whether this is the sending side.
        timeout_s: Seconds that one side waits for the other.

    Raises:
        LaunchError: The other side does not open it in time.
    """

    def __init__(self, channel: StoreChannel, name: str, *, sends: bool, timeout_s: float) -> None:
        self._name = name
        self._peer = 1 if sends else 0
        timeout = timedelta(seconds=timeout_s)
        self._group: Any = None  # torch's ProcessGroupGloo stub lacks `send` and `recv`
        with self._named():
            self._group = dist.ProcessGroupGloo(channel.store(f"link/{name}", timeout_s), 1 - self._peer, 2, timeout)

    def close(self) -> None:
        """Close the connection, which ends the other side's wait."""
        self._group = None

    def send(self, checkpoint: Checkpoint) -> int:
        """Send the pieces that the other side requests, and return their size in bytes.

        Raises:
            LaunchError: The other side is gone, or has another checkpoint.
        """
        total = 0
        with self._named():
            size = np.zeros(1, np.int64)
            self._take(size.view(np.uint8))
            request = np.empty(size[0], np.uint8)
            self._take(request)
            digest, pieces = json.loads(request.tobytes())
            if digest != checkpoint.digest:
                raise LaunchError(
                    "Two hosts have different checkpoints of the same iteration", where=self._name, found=digest
                )
            for _, data in read_blocks(checkpoint, blocks_of(checkpoint, pieces)):
                self._put(data)
                total += data.nbytes
        return total

    def receive(self, writer: PieceWriter, checkpoint: Checkpoint, pieces: PieceNumbers) -> None:
        """Request pieces, check their digests, and write the correct ones.

        Raises:
            LaunchError: The other side is gone, or has another checkpoint.
            OSError: The disk fails.
        """
        request = np.frombuffer(bytearray(json.dumps([checkpoint.digest, pieces]).encode()), np.uint8)
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        with self._named():
            self._put(np.array([request.size], np.int64).view(np.uint8))
            self._put(request)
            for block in blocks_of(checkpoint, pieces):
                data = buffer[: block.hi - block.lo]
                self._take(data)
                writer.write(block, data)

    def _put(self, data: Bytes) -> None:
        self._group.send([torch.from_numpy(data)], self._peer, _TAG).wait()

    def _take(self, data: Bytes) -> None:
        self._group.recv([torch.from_numpy(data)], self._peer, _TAG).wait()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name this link in connection errors."""
        try:
            yield
        except (AttributeError, RuntimeError, ValueError) as error:  # AttributeError after another thread's `close`
            reason = str(error).splitlines()[0].split("] ")[-1]
            raise LaunchError("A link between two hosts failed", where=self._name, found=reason) from error
