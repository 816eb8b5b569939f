"""Moves pieces between hosts by torch's point-to-point calls, on separate process groups with two ranks.

Training's collectives are not touched: a broken or slow link delays only its pieces.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reprise.errors import CheckpointError, LaunchError
from reprise.format.host_file import PieceNumbers, union
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.blocks import blocks_of
from reprise.loading.reader import Bytes, Checkpoint
from reprise.local.parts import Transfer
from reprise.local.pieces import PieceWriter, read_blocks
from reprise.ranks.channel import StoreChannel
from reprise.storage.worker import run_together

_TAG = 0


def exchange(
    channel: StoreChannel,
    name: str,
    checkpoint: Checkpoint,
    transfers: Sequence[Transfer],
    pieces: Mapping[int, PieceNumbers],
    *,
    host: int,
    timeout_s: float,
) -> None:
    """Send and receive parts, and record the received pieces in `host.json`.

    Every host works through the transfers in the same order, with one thread to send and another to receive, so both
    sides are always ready for the first open transfer.

    Args:
        name: The exchange's name, new on this channel and equal on all hosts.
        pieces: By part, the pieces to receive.
        host: This host's number.
        timeout_s: Seconds that one side waits for the other.

    Raises:
        TrainerError: Another host is gone, or bytes do not match their digests.
        OSError: The disk fails.
    """

    def link(transfer: Transfer) -> closing[Link]:
        path = f"{name}/{transfer.source}-{transfer.target}-{transfer.part}"
        return closing(Link(channel, path, sends=transfer.source == host, timeout_s=timeout_s))

    def send() -> None:
        for transfer in transfers:
            if transfer.source == host:
                with link(transfer) as outgoing:
                    outgoing.send(checkpoint)

    def receive() -> None:
        received = list[PieceNumbers]()
        with closing(PieceWriter(checkpoint)) as writer:
            try:
                for transfer in transfers:
                    if transfer.target == host:
                        with link(transfer) as incoming:
                            incoming.receive(writer, checkpoint, pieces[transfer.part])
                        received.append(pieces[transfer.part])
            finally:
                writer.finish(union(received))
        for block in writer.damage:
            assert checkpoint.host is not None
            writers = checkpoint.host.writers[block.place.spec.name]
            raise CheckpointError(
                "Part of a local checkpoint arrived damaged",
                where=checkpoint.path,
                found=f"{block}, written by {checkpoint.host.hosts[writers[block.number]]}",
                fix="A load reads it from another host, or takes an older checkpoint.",
            )

    run_together([receive, send], name="checkpoint-send", threads=2)


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
        timeout, self._store = timedelta(seconds=timeout_s), channel.store(f"link/{name}", timeout_s)
        self._group: Any = None  # torch's ProcessGroupGloo stub lacks `send` and `recv`
        with self._named():
            self._group = dist.ProcessGroupGloo(self._store, 1 - self._peer, 2, timeout)

    def close(self) -> None:
        """Close the connection, which ends the other side's wait."""
        self._group = None

    def send(self, checkpoint: Checkpoint) -> None:
        """Send the pieces that the other side requests.

        Raises:
            LaunchError: The other side is gone, or has another checkpoint.
        """
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
            for rank in range(2):  # Gloo's messages, by which both sides have found each other
                self._store.delete_key(f"0/{rank}")

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
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0].split("] ")[-1]
            raise LaunchError("A link between two hosts failed", where=self._name, found=reason) from error
