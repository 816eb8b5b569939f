"""Reads and writes single pieces of a local checkpoint, block by block."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from reprise.atomic import replace_file
from reprise.errors import TrainerError
from reprise.format.host_file import PieceNumbers, path_of, union
from reprise.format.layout import Place
from reprise.format.manifest import BLOCK_BYTES, digest_of
from reprise.format.names import HOST
from reprise.loading.blocks import PieceBlock, blocks_of
from reprise.loading.reader import (
    GAP_BYTES,
    SCRATCH_BYTES,
    Bytes,
    Checkpoint,
    Gatherer,
    OpenFile,
    covered_bytes,
    open_tensor_file,
)
from reprise.storage.files import MOST_OPEN

_log = logging.getLogger(__name__)


class PieceReader:
    """Reads blocks of a checkpoint folder, in the order of its files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._gatherer = checkpoint, Gatherer()

    def read(self, blocks: Iterator[PieceBlock], buffer: Bytes) -> Iterator[tuple[PieceBlock, Bytes]]:
        """Yield each block with its bytes, which are valid until the next. Digests are not checked.

        The bytes of an unreadable block are zeros: its receiver finds another digest.
        """
        for name, members in itertools.groupby(blocks, key=lambda block: block.place.file):
            with contextlib.ExitStack() as stack:
                file: OpenFile | None = None
                try:
                    path = self._checkpoint.path / name
                    file = stack.enter_context(open_tensor_file(self._checkpoint.files, path))
                except TrainerError as error:
                    _log.error("%s", error)
                for block in members:
                    data = buffer[: block.hi - block.lo]
                    self._fill(file, block, data)
                    yield block, data

    def _fill(self, file: OpenFile | None, block: PieceBlock, data: Bytes) -> None:
        try:
            if file is not None:
                self._gatherer.gather(file.read, block.packed, block.lo, data, offset=block.place.offset)
                return
        except (TrainerError, OSError) as error:
            _log.error("%s, tensor %s: %s", self._checkpoint.path, block.place.spec.name, error)
        data[:] = 0


class PieceWriter:
    """Writes blocks into the folder of a committed checkpoint, and notes in `host.json` which pieces are there.

    A single thread writes to a folder: rows of a strided piece are written with the bytes between them, as they are.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._files = checkpoint, checkpoint.files
        self._scratch: Bytes = np.empty(SCRATCH_BYTES, np.uint8)
        self._open: dict[str, int] = {}
        self._damaged: set[tuple[str, int]] = set()
        self.damage: list[str] = []

    def write(self, block: PieceBlock, data: Bytes) -> None:
        """Write a block with the right digest. A piece with a wrong digest counts as missing.

        Raises:
            OSError: if the disk fails.
        """
        name = block.place.spec.name
        if digest_of(data.data) != block.digest:
            self._damaged.add((name, block.number))
            self.damage.append(str(block))
            return
        self.write_checked(block, data)

    def write_checked(self, block: PieceBlock, data: Bytes) -> None:
        """Write a block whose digest was found to be right.

        Raises:
            OSError: if the disk fails.
        """
        descriptor = self._descriptor(block.place.file)
        for shape, start, at in block.packed.boxes(block.lo, block.hi):
            part = data[at - block.lo : at - block.lo + int(np.prod(shape))].reshape(shape)
            self._cover(descriptor, block.place.offset + start, block.packed.strides, part)

    def finish(self, pieces: PieceNumbers) -> None:
        """Make these pieces durable, and note in `host.json` those whose bytes are right.

        Raises:
            OSError: if the disk fails.
        """
        self.sync()
        good = {
            name: tuple(number for number in members if (name, number) not in self._damaged)
            for name, members in pieces.items()
        }
        host = self._checkpoint.host
        assert host is not None
        present = union([host.held, good])
        noted = replace(host, held=present)
        if noted.is_whole:
            self._show_names()
        replace_file(self._files, self._checkpoint.path / HOST, noted.to_bytes())
        self._checkpoint = replace(self._checkpoint, host=noted)

    def _show_names(self) -> None:
        """Give the files of a folder, now complete, the names for other programs."""
        folder = self._checkpoint.path
        for name in self._checkpoint.manifest.files:
            path = path_of(folder, name)
            if path != folder / name:
                self._files.rename(path, folder / name)
                self._files.sync_folder(folder)

    def sync(self) -> None:
        """Make all writes durable.

        Raises:
            OSError: if the disk fails.
        """
        for descriptor in self._open.values():
            self._files.sync(descriptor)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._files.close(self._open.popitem()[1])

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            self._limit_open()
            self._open[name] = self._files.open_for_writing(self._checkpoint.path / name)
        return self._open[name]

    def _limit_open(self) -> None:
        if len(self._open) >= MOST_OPEN:
            self.sync()
            self.close()

    def _cover(self, descriptor: int, start: int, strides: tuple[int, ...], data: Bytes) -> None:
        """Write the C-ordered array `data` to bytes at `start` with `strides`, the last of which is 1."""
        if data.ndim == 1:
            self._files.write(descriptor, [data.data], offset=start)
            return
        count, stride = len(data), strides[0]
        inner = covered_bytes(data.shape[1:], strides[1:])
        if stride - inner > GAP_BYTES or inner > self._scratch.size or count == 1:
            for index in range(count):
                self._cover(descriptor, start + index * stride, strides[1:], data[index])
            return
        most = 1 + (self._scratch.size - inner) // stride
        for first in range(0, count, most):
            part = data[first : first + most]
            covering = self._scratch[: (len(part) - 1) * stride + inner]
            self._files.read(descriptor, covering.data, offset=start + first * stride)
            np.copyto(np.ndarray(part.shape, np.uint8, covering, 0, strides), part)
            self._files.write(descriptor, [covering.data], offset=start + first * stride)


def damaged_pieces(
    checkpoint: Checkpoint, places: Mapping[str, Place], pieces: PieceNumbers
) -> dict[str, tuple[int, ...]]:
    """Return those of these pieces with bytes other than their digests'."""
    damaged: dict[str, list[int]] = {}
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    for block, data in PieceReader(checkpoint).read(blocks_of(checkpoint, places, pieces), buffer):
        name = block.place.spec.name
        if digest_of(data.data) != block.digest and block.number not in damaged.get(name, ()):
            damaged.setdefault(name, []).append(block.number)
    return {name: tuple(numbers) for name, numbers in damaged.items()}
