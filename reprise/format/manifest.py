"""A checkpoint's manifest: file sizes and digests for the whole folder, and the pieces tiling each tensor.

Digests are `xxh3_64` (https://github.com/Cyan4973/xxHash) as 16 hex digits.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from reprise.format.box import Box
from reprise.format.layout import integers, is_shape
from reprise.format.names import MANIFEST_FORMAT
from reprise.storage import json_file
from reprise.storage.json_file import integer

Integers = npt.NDArray[np.int64]
FORMAT = MANIFEST_FORMAT
BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 8
_MOST_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[lo, hi)` in the packed image of `box`, written by a single rank: the whole box or a part."""

    name: str
    box: Box
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class WrittenPiece(Piece):
    """A piece and its packed block digests."""

    digests: bytes


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file's size in bytes and digest, which covers a safetensors file's header or any other file's content."""

    total_bytes: int
    digest: str
    is_tensor_file: bool


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's pieces: `cuts` along each `view` dimension form a grid with its cells in C order.

    Several replicas wrote a cell in `shares`, cut at these byte offsets in its packed image. `digests` holds the
    block digests for all pieces in order, eight bytes each, big-endian.
    """

    view: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    shares: Mapping[int, tuple[int, ...]]
    digests: bytes

    def pieces_in(self, box: Box, itemsize: int) -> Iterator[tuple[int, WrittenPiece]]:
        """Yield the pieces in all cells overlapping `box`, each with its number among all pieces."""
        first_blocks: Sequence[int] | Integers = (0,)
        first_pieces: Sequence[int] | Integers = (0,)
        if self._cell_count > 1:  # unlike most tensors in a small run
            blocks, pieces, _ = self._in_cells(itemsize)
            first_blocks, first_pieces = np.cumsum(blocks) - blocks, np.cumsum(pieces) - pieces
        for cell, cell_box in _cells_in(self.cuts, box):
            position, number = int(first_blocks[cell]) * DIGEST_BYTES, int(first_pieces[cell])
            bounds = (0, *self.shares.get(cell, ()), cell_box.numel * itemsize)
            for lo, hi in itertools.pairwise(bounds):
                length = block_count(hi - lo) * DIGEST_BYTES
                yield number, WrittenPiece("", cell_box, lo, hi, self.digests[position : position + length])
                position += length
                number += 1

    @property
    def _cell_count(self) -> int:
        return math.prod(len(marks) - 1 for marks in self.cuts)

    def _in_cells(self, itemsize: int) -> tuple[Integers, Integers, bool]:
        """Return each cell's block count and piece count, and whether every piece of a shared cell has bytes.

        The caller bounds the cells: a tensor has at most as many as digests. The counts end with a piece without bytes.
        """
        sizes = np.array([itemsize], dtype=np.int64)
        for marks in self.cuts:
            sizes = np.multiply.outer(sizes, _distances(marks)).ravel()
        blocks, pieces = -(-sizes // BLOCK_BYTES), np.ones_like(sizes)
        for cell, offsets in self.shares.items():
            ranges = list(itertools.pairwise((0, *offsets, int(sizes[cell]))))
            if offsets and any(lo >= hi for lo, hi in ranges):
                return blocks, pieces, False
            blocks[cell], pieces[cell] = sum(block_count(hi - lo) for lo, hi in ranges), len(ranges)
        return blocks, pieces, True

    def fits(self, itemsize: int) -> bool:
        """Return whether shares and digest count fit a tensor with `itemsize`-byte items."""
        cells, total_bytes = self._cell_count, math.prod(self.view) * itemsize
        count, remainder = divmod(len(self.digests), DIGEST_BYTES)
        # A cell has at least one digest, and a digest is for at most a block: no product below overflows.
        if remainder or cells > count or total_bytes > count * BLOCK_BYTES:
            return False
        if cells < 2 and not self.shares:  # none is in an empty tensor, whose other dimensions may have any cuts
            return count == block_count(total_bytes)
        if not all(0 <= number < cells for number in self.shares):
            return False
        blocks, _, are_filled = self._in_cells(itemsize)
        return are_filled and count == int(blocks.sum())


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything needed to check a checkpoint folder. `aliases` maps a tied name to the stored name."""

    attempt: str
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]


def digest_of(data: bytes | memoryview) -> str:
    """Return the data's `xxh3_64` digest as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def block_count(total_bytes: int) -> int:
    """Return the block count for a piece with `total_bytes` bytes."""
    return -(-total_bytes // BLOCK_BYTES)


def _cells_in(cuts: Sequence[Sequence[int]], box: Box) -> Iterator[tuple[int, Box]]:
    """Yield the cells overlapping `box`, each with its number."""
    if not box.numel:
        return
    ranges = [
        range(bisect_right(marks, offset) - 1, min(bisect_left(marks, end), len(marks) - 1))
        for marks, offset, end in zip(cuts, box.offset, box.end, strict=True)
    ]
    for indices in itertools.product(*ranges):
        number = 0
        for index, marks in zip(indices, cuts, strict=True):
            number = number * (len(marks) - 1) + index
        offset = tuple(marks[index] for index, marks in zip(indices, cuts, strict=True))
        end = tuple(marks[index + 1] for index, marks in zip(indices, cuts, strict=True))
        yield number, Box(offset, tuple(hi - lo for lo, hi in zip(offset, end, strict=True)))


@functools.lru_cache(maxsize=_MOST_REMEMBERED)
def _distances(marks: tuple[int, ...]) -> Integers:
    """Return the distances between neighboring marks. Cached: most tensors share their cuts."""
    array = np.array(marks, dtype=np.int64)
    return array[1:] - array[:-1]


def to_bytes(manifest: Manifest) -> bytes:
    """Return the JSON form. Its last member is the digest of all bytes before that member's comma."""
    return json_file.sealed(
        {
            "format": FORMAT,
            "attempt": manifest.attempt,
            "block_bytes": BLOCK_BYTES,
            "files": {
                name: {
                    "bytes": entry.total_bytes,
                    "header_xxh3_64" if entry.is_tensor_file else "xxh3_64": entry.digest,
                }
                for name, entry in manifest.files.items()
            },
            "aliases": dict(manifest.aliases),
            "tensors": {name: _tensor_json(entry) for name, entry in manifest.tensors.items()},
        }
    )


def _tensor_json(entry: TensorEntry) -> dict[str, object]:
    table: dict[str, object] = {"view": list(entry.view), "cuts": [list(marks) for marks in entry.cuts]}
    if entry.shares:
        table["shares"] = {str(cell): list(offsets) for cell, offsets in entry.shares.items()}
    table["digests"] = entry.digests.hex()
    return table


def from_bytes(data: bytes, *, where: object) -> Manifest:
    """Parse and check a manifest.

    Raises:
        MismatchError: It has another format version.
        CheckpointError: It is damaged or inconsistent.
    """
    return json_file.unsealed(
        data, _from_table, kind="manifest", form=FORMAT, where=where, fix="Load another iteration."
    )


def _from_table(table: Mapping[str, Any]) -> Manifest:
    if table["block_bytes"] != BLOCK_BYTES:
        raise ValueError(f"block_bytes is {table['block_bytes']}")
    files = {}
    for name, entry in table["files"].items():
        is_tensor_file = "header_xxh3_64" in entry
        digest = entry["header_xxh3_64" if is_tensor_file else "xxh3_64"]
        files[_inside(name)] = FileEntry(integer(entry["bytes"]), str(digest), is_tensor_file)
    tensors = {name: _tensor_entry(entry) for name, entry in table["tensors"].items()}
    return Manifest(str(table["attempt"]), files, tensors, dict(table["aliases"]))


def _tensor_entry(entry: Mapping[str, Any]) -> TensorEntry:
    view = integers(entry["view"])
    if not is_shape(view):
        raise ValueError(f"a view of {len(view)} dimensions has too many dimensions or elements")
    cuts = tuple(map(integers, entry["cuts"]))
    if len(cuts) != len(view) or any(
        marks[0] != 0 or marks[-1] != n or (_distances(marks) <= 0).any() for marks, n in zip(cuts, view, strict=True)
    ):
        raise ValueError(f"cuts {cuts} do not fit a tensor of {view}")
    shares = {_cell(key): integers(offsets) for key, offsets in entry.get("shares", {}).items()}
    # Only the headers know the item size, with which `reader.read_places` checks digests and shares.
    return TensorEntry(view, cuts, shares, bytes.fromhex(entry["digests"]))


def _cell(key: str) -> int:
    cell = int(key)
    if str(cell) != key:
        raise ValueError(f"{key!r} is not a cell number")
    return cell


def _inside(name: str) -> str:
    """Return `name` if it is a relative path within the folder."""
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"the file name {name!r} is not a path inside the folder")
    return name
