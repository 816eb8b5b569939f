"""Checks the digests of blocks in a checkpoint without filling tensors."""

from __future__ import annotations

from reprise.loading.block_reader import BlockReader, Progress
from reprise.loading.blocks import blocks_of
from reprise.loading.reader import Checkpoint, read_places


def verify_tensors(checkpoint: Checkpoint, *, progress: Progress = lambda _: None) -> int:
    """Check every block's digest. Return the checked byte count.

    Args:
        progress: See `BlockReader.run`.

    Raises:
        CheckpointError: A header or block is damaged. Names the file, tensor and byte range for the first.
    """
    reader = BlockReader(checkpoint, blocks_of(checkpoint, {n: checkpoint.held(n) for n in read_places(checkpoint)}))
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
    BlockReader(checkpoint, blocks).run()
