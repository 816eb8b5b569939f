"""The bytes of a save, as they were when it was asked for. Who writes them where is told elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from trainer.checkpoint.live import LiveTensor
from trainer.checkpoint.ownership import Piece
from trainer.errors import CheckpointError


class Snapshot:
    """Gives the bytes of pieces: straight from live memory where that lies as the file does, else from a copy.

    Live memory stays that of the iteration saved until the optimizer's next step; the caller holds that step back.
    """

    def __init__(self, live: Sequence[LiveTensor], pieces: Sequence[Piece]) -> None:
        wanted = {piece.name for piece in pieces}
        self._memory = {t.spec.name: memory_of(t.local) for t in live if t.spec.name in wanted}
        self._given_up = threading.Event()

    def bytes_of(self, piece: Piece) -> memoryview:
        """Return bytes `[piece.lo, piece.hi)` of the packed image of the piece's box."""
        return self._memory[piece.name][piece.lo : piece.hi]

    def give_up(self) -> None:
        """Say that live memory may change from now on; what is still being written from it must not be committed."""
        self._given_up.set()

    def check(self) -> None:
        """Refuse to go on if live memory may have changed while it was read.

        Raises:
            CheckpointError: after `give_up`.
        """
        if self._given_up.is_set():
            raise CheckpointError("A save was given up while it was being written", fix="Training goes on.")


def is_direct(local: torch.Tensor) -> bool:
    """Return whether a tensor's memory is the packed image of its box, readable by the host."""
    return local.device.type == "cpu" and local.is_contiguous()


def memory_of(local: torch.Tensor) -> memoryview:
    """Return the packed image of a tensor: its own memory where that is possible, else a copy on the host."""
    packed = local.detach().contiguous().cpu()
    return memoryview(packed.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
