"""Fetches pieces of a local checkpoint into the folder of a host: from other hosts, and from the shared folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from reprise.commit.attempt import Hosts
from reprise.commit.channel import StoreChannel
from reprise.errors import CheckpointError
from reprise.format.host_file import PieceNumbers, union
from reprise.format.layout import Place
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.blocks import blocks_of
from reprise.loading.reader import Checkpoint, read_places
from reprise.local.link import Link
from reprise.local.pieces import PieceReader, PieceWriter
from reprise.local.survey import Transfer
from reprise.storage.worker import Worker


class Fetcher:
    """Carries out transfers between the leaders of a run; call it on all of them.

    Args:
        timeout_s: how long a side waits for the other.
    """

    def __init__(self, channel: StoreChannel, hosts: Hosts, *, nonce: str, timeout_s: float) -> None:
        self._channel, self._nonce, self._timeout_s = channel, nonce, timeout_s
        self._host = hosts.number_of(channel.rank)
        self._calls = 0

    def run(
        self,
        checkpoint: Checkpoint,
        places: dict[str, Place],
        transfers: Sequence[Transfer],
        from_shared: PieceNumbers,
        shared: Callable[[int], Checkpoint],
    ) -> None:
        """Send and receive, read the rest from the shared folder, and note in `host.json` what is there now.

        Every host works through the transfers in the same order, with a thread to send and another to receive: the
        first open transfer always has both its sides ready.

        Args:
            shared: opens the shared checkpoint of an iteration.

        Raises:
            TrainerError: if another host is gone, or bytes differ from their digests.
            OSError: if the disk fails.
        """
        self._calls += 1
        sending = Worker("checkpoint-send")
        job = sending.submit(lambda: self._send(checkpoint, places, transfers))
        writer = PieceWriter(checkpoint)
        try:
            incoming = [transfer for transfer in transfers if transfer.target == self._host]
            for transfer in incoming:
                with closing(self._link(transfer, sends=False)) as link:
                    link.receive(writer, checkpoint, places, transfer.pieces)
            if from_shared:
                self._copy(shared(checkpoint.iteration), writer, checkpoint, places, from_shared)
            writer.finish(union([*(transfer.pieces for transfer in incoming), from_shared]))
        finally:
            writer.close()
            job.ends(self._timeout_s)
            sending.close(0.0)
        job.wait(self._timeout_s)
        if writer.damage:
            raise CheckpointError(
                "Bytes of a local checkpoint arrived damaged",
                where=checkpoint.path,
                found=writer.damage[0],
                fix="They are read from another host, or an older checkpoint is loaded.",
            )

    def _send(self, checkpoint: Checkpoint, places: dict[str, Place], transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if transfer.source == self._host:
                with closing(self._link(transfer, sends=True)) as link:
                    link.send(checkpoint, places, transfer.pieces)

    def _link(self, transfer: Transfer, *, sends: bool) -> Link:
        name = f"{self._nonce}/fetch-{self._calls}/{transfer.source}-{transfer.target}"
        return Link(self._channel, name, sends=sends, timeout_s=self._timeout_s)

    def _copy(
        self,
        source: Checkpoint,
        writer: PieceWriter,
        checkpoint: Checkpoint,
        places: Mapping[str, Place],
        pieces: PieceNumbers,
    ) -> None:
        """Copy pieces from the shared checkpoint of the same iteration, whose files may be cut elsewhere.

        Raises:
            CheckpointError: if the shared checkpoint has other tensors.
        """
        shared_places, buffer = read_places(source), np.empty(BLOCK_BYTES, np.uint8)
        for name in pieces:
            if name not in shared_places or shared_places[name].spec.shape != places[name].spec.shape:
                raise CheckpointError("The shared checkpoint has other tensors", where=source.path, found=name)
        elsewhere = {
            name: replace(places[name], file=shared_places[name].file, offset=shared_places[name].offset)
            for name in pieces
        }
        blocks = sorted(
            blocks_of(checkpoint, places, pieces), key=lambda block: (elsewhere[block.place.spec.name].file, block.lo)
        )
        moved = (replace(block, place=elsewhere[block.place.spec.name]) for block in blocks)
        for block, data in PieceReader(source).read(moved, buffer):
            writer.write(replace(block, place=places[block.place.spec.name]), data)
