"""Checks the digest of every block of a checkpoint without filling tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trainer.checkpoint.format.layout import Place
from trainer.checkpoint.format.manifest import BLOCK_BYTES, DIGEST_BYTES, WrittenPiece
from trainer.checkpoint.loading.gather import Gatherer
from trainer.checkpoint.loading.reader import Checkpoint, check_block, open_tensor_file


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes `[lo, hi)` of a packed piece, with the expected `digest`."""

    place: Place
    piece: WrittenPiece
    lo: int
    hi: int
    digest: bytes


def verify_share(
    checkpoint: Checkpoint,
    places: Mapping[str, Place],
    *,
    rank: int,
    world_size: int,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Check the digest of every `world_size`-th block, from number `rank` on; return the number of bytes read.

    Args:
        progress: called with the number of bytes checked since the last call.

    Raises:
        CheckpointError: naming the file, the tensor and the byte range of the first damaged block.
    """
    gatherer, buffer = Gatherer(), np.empty(BLOCK_BYTES, dtype=np.uint8)
    checked_bytes = 0
    mine = itertools.islice(_blocks(checkpoint, places), rank, None, world_size)
    for name, blocks in itertools.groupby(mine, key=lambda block: block.place.file):
        with open_tensor_file(checkpoint.files, checkpoint.path / name) as file:
            for block in blocks:
                data = buffer[: block.hi - block.lo]
                spec = block.place.spec
                packed = spec.image(block.piece.box)
                gatherer.gather(file.read, packed, block.lo, data, offset=block.place.offset)
                check_block(checkpoint, block.place, data.data, digest=block.digest, at=(block.lo, block.hi))
                checked_bytes += data.nbytes
                progress(data.nbytes)
    return checked_bytes


def _blocks(checkpoint: Checkpoint, places: Mapping[str, Place]) -> Iterator[_Block]:
    """Yield the blocks of all tensors in file order, those of them that the folder holds."""
    for place in sorted(places.values(), key=lambda place: (place.file, place.offset)):
        held = checkpoint.held(place.spec.name)
        pieces = checkpoint.manifest.tensors[place.spec.name].pieces(place.spec.dtype.itemsize)
        for piece in (piece for number, piece in enumerate(pieces) if number in held):
            for number, lo in enumerate(range(piece.lo, piece.hi, BLOCK_BYTES)):
                digest = piece.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                yield _Block(place, piece, lo, min(lo + BLOCK_BYTES, piece.hi), digest)
