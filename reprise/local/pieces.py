"""Reads and writes a local checkpoint's pieces, block by block."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from reprise.errors import TrainerError
from reprise.format.host_file import PieceNumbers, path_of, union, without
from reprise.format.manifest import BLOCK_BYTES, digest_of
from reprise.format.names import HOST
from reprise.loading.blocks import PieceBlock, blocks_of
from reprise.loading.reader import Bytes, Checkpoint, OpenFile, open_tensor_file
from reprise.storage.atomic import replace_file
from reprise.storage.files import MAX_OPEN_FILES

_log = logging.getLogger(__name__)


def read_blocks(checkpoint: Checkpoint, blocks: Iterable[PieceBlock]) -> Iterator[tuple[PieceBlock, Bytes]]:
    """Yield each block with its bytes, which are valid until the next. Digests are not checked.

    An unreadable block yields zeros: its receiver detects a wrong digest.
    """
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    for name, members in itertools.groupby(blocks, key=lambda block: block.place.file):
        with contextlib.ExitStack() as stack:
            file: OpenFile | None = None
            for block in members:
                data = buffer[: block.hi - block.lo]
                try:
                    file = file or stack.enter_context(open_tensor_file(checkpoint.files, checkpoint.path / name))
                    file.gather(block.packed, block.lo, data, offset=block.place.offset)
                except (TrainerError, OSError) as error:
                    _log.error("%s, tensor %s: %s", checkpoint.path, block.place.spec.name, error)
                    data[:] = 0
                yield block, data


def damaged_pieces(checkpoint: Checkpoint, pieces: PieceNumbers) -> dict[str, tuple[int, ...]]:
    """Return the pieces whose bytes do not match their digests."""
    return union(
        {block.place.spec.name: (block.number,)}
        for block, data in read_blocks(checkpoint, blocks_of(checkpoint, pieces))
        if digest_of(data.data) != block.digest
    )


class PieceWriter:
    """Writes blocks into a checkpoint folder, and records in `host.json` which pieces are there.

    Attributes:
        damage: Blocks that arrived with a wrong digest.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._files = checkpoint, checkpoint.files
        self._open: dict[str, int] = {}
        self.damage: list[PieceBlock] = []

    def write(self, block: PieceBlock, data: Bytes) -> bool:
        """Write a block if its digest is right, and return whether it is. A piece with a damaged block counts as
        missing.

        Raises:
            OSError: The disk fails.
        """
        if digest_of(data.data) != block.digest:
            self.damage.append(block)
            return False
        descriptor, offset = self._descriptor(block.place.file), block.place.offset
        for in_tensor, in_image, length in block.packed.spans(block.lo, block.hi):
            row = data.data[in_image - block.lo :][:length]
            self._files.write(descriptor, row, offset=offset + in_tensor)
        return True

    def finish(self, pieces: PieceNumbers) -> None:
        """Make these pieces durable, and record the undamaged ones in `host.json`.

        Raises:
            OSError: The disk fails.
        """
        self.sync()
        host, folder = self._checkpoint.host, self._checkpoint.path
        assert host is not None
        damaged = union({block.place.spec.name: (block.number,)} for block in self.damage)
        noted = replace(host, held=union([host.held, without(pieces, damaged)]))
        for name in self._checkpoint.manifest.files if noted.is_whole else ():
            path = path_of(folder, name)
            if path != folder / name:  # the name that other programs expect
                self._files.rename(path, folder / name)
                self._files.sync_folder(folder)
        replace_file(self._files, folder / HOST, noted.to_bytes())
        self._checkpoint = replace(self._checkpoint, host=noted)

    def sync(self) -> None:
        """Make all writes durable.

        Raises:
            OSError: The disk fails.
        """
        for descriptor in self._open.values():
            self._files.sync(descriptor)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._files.close(self._open.popitem()[1])

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self.sync()
                self.close()
            self._open[name] = self._files.open_for_writing(self._checkpoint.path / name)
        return self._open[name]
