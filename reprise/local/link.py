"""Sends pieces between two hosts over torch's point to point, on a process group of two of its own.

Training's collectives are not touched: a broken or slow link delays nothing but its pieces.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from reprise.commit.channel import StoreChannel
from reprise.errors import LaunchError
from reprise.format.host_file import PieceNumbers
from reprise.format.layout import Place
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.blocks import blocks_of
from reprise.loading.reader import Checkpoint
from reprise.local.pieces import PieceReader, PieceWriter

_TAG = 0
_HELLO_BYTES = 8


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
        try:
            self._group = dist.ProcessGroupGloo(channel.store(f"link/{name}", timeout_s), 1 - self._peer, 2, timeout)
        except (RuntimeError, ValueError) as error:
            raise self._broken(error) from error

    def close(self) -> None:
        """Close the connection: the other side then waits no longer."""
        self._group = None

    def send(self, checkpoint: Checkpoint, places: dict[str, Place], pieces: PieceNumbers) -> int:
        """Send pieces of a checkpoint in the order of its files, and return their bytes.

        Raises:
            LaunchError: if the other side is gone, or expects other pieces.
        """
        total = 0
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        try:
            self._greet(_hello(checkpoint, pieces), sends=True)
            for _, data in PieceReader(checkpoint).read(blocks_of(checkpoint, places, pieces), buffer):
                self._group.send([torch.from_numpy(data)], self._peer, _TAG).wait()
                total += data.nbytes
        except (AttributeError, RuntimeError) as error:  # the first after `close` by another thread
            raise self._broken(error) from error
        return total

    def receive(
        self, writer: PieceWriter, checkpoint: Checkpoint, places: dict[str, Place], pieces: PieceNumbers
    ) -> None:
        """Receive pieces, check their digests, and write those with the right digest.

        Raises:
            LaunchError: if the other side is gone, or sends other pieces.
            OSError: if the disk fails.
        """
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        try:
            self._greet(_hello(checkpoint, pieces), sends=False)
            for block in blocks_of(checkpoint, places, pieces):
                data = buffer[: block.hi - block.lo]
                self._group.recv([torch.from_numpy(data)], self._peer, _TAG).wait()
                writer.write(block, data)
        except (AttributeError, RuntimeError) as error:
            raise self._broken(error) from error

    def send_message(self, name: str, data: bytes) -> None:
        """Send a message.

        Args:
            name: of the message, new on this link.

        Raises:
            LaunchError: if the other side is gone.
        """
        try:
            self._group.send([torch.tensor([_number_of(name), len(data)], device="cpu")], self._peer, _TAG).wait()
            self._group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], self._peer, _TAG).wait()
        except (AttributeError, RuntimeError) as error:
            raise self._broken(error) from error

    def receive_message(self, name: str) -> bytes:
        """Return the message with this name, past messages that were not received.

        Raises:
            LaunchError: if the other side is gone.
        """
        number = -1
        try:
            while number != _number_of(name):
                head = torch.zeros(2, dtype=torch.int64, device="cpu")
                self._group.recv([head], self._peer, _TAG).wait()
                number, size = head.tolist()
                data = torch.empty(size, dtype=torch.uint8, device="cpu")
                self._group.recv([data], self._peer, _TAG).wait()
        except (AttributeError, RuntimeError) as error:
            raise self._broken(error) from error
        return data.numpy().tobytes()

    def _greet(self, hello: bytes, *, sends: bool) -> None:
        """Compare the two sides' lists of pieces."""
        hello_bytes = torch.frombuffer(bytearray(hello), dtype=torch.uint8)
        if sends:
            self._group.send([hello_bytes], self._peer, _TAG).wait()
            return
        answer = torch.empty(_HELLO_BYTES, dtype=torch.uint8, device="cpu")
        self._group.recv([answer], self._peer, _TAG).wait()
        if not torch.equal(hello_bytes, answer):
            raise LaunchError("Two hosts disagree on the pieces that go from one to the other", where=self._name)

    def _broken(self, error: Exception) -> LaunchError:
        return LaunchError(
            "A link between two hosts failed", where=self._name, found=str(error).splitlines()[0].split("] ")[-1]
        )


def _number_of(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1  # in int64


def _hello(checkpoint: Checkpoint, pieces: PieceNumbers) -> bytes:
    return xxhash.xxh3_64_digest(f"{checkpoint.digest} {sorted(pieces.items())}".encode())
