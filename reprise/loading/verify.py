"""Checks the digest of every block of a checkpoint without filling tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from reprise.format.layout import Place
from reprise.loading.block_reader import BlockReader, Progress
from reprise.loading.blocks import blocks_of
from reprise.loading.reader import Checkpoint


def verify_share(
    checkpoint: Checkpoint,
    places: Mapping[str, Place],
    *,
    rank: int,
    world_size: int,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> int:
    """Check the digest of every `world_size`-th block, from number `rank` on; return the number of bytes checked.

    Args:
        threads: as `BlockReader.run`.
        progress: as `BlockReader.run`.

    Raises:
        CheckpointError: naming the file, the tensor and the byte range of the first damaged block.
    """
    blocks = blocks_of(checkpoint, places, {name: checkpoint.held(name) for name in places})
    reader = BlockReader(checkpoint, ((block, None) for block in itertools.islice(blocks, rank, None, world_size)))
    reader.run(threads, progress)
    return reader.done_bytes
