"""Checks the digest of every block in a checkpoint without filling tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from reprise.format.layout import Place
from reprise.loading.block_reader import BlockRead, BlockReader, Progress
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
    """Check every `world_size`-th block's digest, starting at block `rank`. Return the checked byte count.

    Args:
        threads: See `BlockReader.run`.
        progress: See `BlockReader.run`.

    Raises:
        CheckpointError: A block is damaged. Names the file, tensor and byte range for the first.
    """
    blocks = blocks_of(checkpoint, places, {name: checkpoint.held(name) for name in places})
    reader = BlockReader(checkpoint, map(BlockRead, itertools.islice(blocks, rank, None, world_size)))
    reader.run(threads, progress)
    return reader.done_bytes
