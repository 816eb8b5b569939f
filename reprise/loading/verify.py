"""Checks the digest of every block of a checkpoint without filling tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from reprise.format.layout import Place
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.blocks import blocks_of
from reprise.loading.reader import Checkpoint, Gatherer, open_tensor_file


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
    blocks_here = blocks_of(checkpoint, places, {name: checkpoint.held(name) for name in places})
    share = itertools.islice(blocks_here, rank, None, world_size)
    for name, blocks in itertools.groupby(share, key=lambda block: block.place.file):
        with open_tensor_file(checkpoint.files, checkpoint.path / name) as file:
            for block in blocks:
                data = buffer[: block.hi - block.lo]
                block.read(checkpoint, file, gatherer, data)
                checked_bytes += data.nbytes
                progress(data.nbytes)
    return checked_bytes
