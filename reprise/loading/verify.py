"""Checks the digests of blocks in a checkpoint without filling tensors."""

from __future__ import annotations

import itertools

from reprise.loading.block_reader import BlockRead, BlockReader, Progress
from reprise.loading.blocks import blocks_of
from reprise.loading.reader import Checkpoint, read_places


def verify_share(
    checkpoint: Checkpoint, *, rank: int = 0, world_size: int = 1, progress: Progress = lambda _: None
) -> int:
    """Check every `world_size`-th block's digest, starting at block `rank`. Return the checked byte count.

    Args:
        progress: See `BlockReader.run`.

    Raises:
        CheckpointError: A header or block is damaged. Names the file, tensor and byte range for the first.
    """
    blocks = blocks_of(checkpoint, {name: checkpoint.held(name) for name in read_places(checkpoint)})
    reader = BlockReader(checkpoint, map(BlockRead, itertools.islice(blocks, rank, None, world_size)))
    reader.run(progress)
    return reader.done_bytes


def check_first_blocks(checkpoint: Checkpoint) -> None:
    """Check each tensor file's first block: another iteration's file has the same size and header.

    Raises:
        CheckpointError: A header or block is damaged. Names the file, tensor and byte range.
    """
    first = dict[str, str]()
    for name, place in sorted(read_places(checkpoint).items(), key=lambda item: item[1].offset, reverse=True):
        if place.spec.total_bytes and 0 in checkpoint.held(name):
            first[place.file] = name
    blocks = (next(blocks_of(checkpoint, {name: range(1)})) for name in first.values())
    BlockReader(checkpoint, map(BlockRead, blocks)).run()
