"""Checks in columns that the pieces of all ranks tile the tensors: millions of pieces need no object each."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reprise.errors import CheckpointError
from reprise.format.layout import Layout, Place
from reprise.format.manifest import BLOCK_BYTES, TensorEntry

# Of a table: the tensor's number, dimensions, first and last byte, blocks; offset and shape follow, eight bytes each.
PIECE = struct.Struct("<IBQQI")
_Integers = npt.NDArray[np.int64]
_BATCH = 256  # tables read together: what one call of numpy takes is no pause for another thread
_HEAD = np.dtype([("tensor", "<u4"), ("dims", "u1"), ("lo", "<i8"), ("hi", "<i8"), ("blocks", "<u4")])
assert _HEAD.itemsize == PIECE.size


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Some pieces, as columns of equal length.

    Args:
        heads: what the tables say of them, but for the boxes.
        boxes: offset and shape of each, `[pieces, 2 * dimensions]`.
        first_blocks: the number of the first block of each, counted over all tables.
    """

    heads: npt.NDArray[np.void]
    boxes: _Integers
    first_blocks: _Integers


def entries_of(layout: Layout, tables: Sequence[bytes]) -> tuple[dict[str, TensorEntry], list[int]]:
    """Return the entries of all tensors, with the number of each block in place of its digest, and each table's blocks.

    Args:
        tables: in the form of `joint_plan.encode`; blocks are counted in their order.

    Raises:
        CheckpointError: naming the first tensor that the pieces do not cover once, or an empty one with a piece.
    """
    by_tensor: dict[int, list[_Pieces]] = defaultdict(list)
    counts: list[int] = []
    for begin in range(0, len(tables), _BATCH):
        for tensor, pieces in _read(tables[begin : begin + _BATCH], counts):
            by_tensor[tensor].append(pieces)
    places = list(layout.places.values())
    entries: dict[str, TensorEntry] = {}
    for number, place in enumerate(places):
        if (number in by_tensor) != (place.spec.total_bytes > 0):
            raise _not_tiled(place, "no piece" if number not in by_tensor else "a piece of a tensor without bytes")
        entries[place.spec.name] = _entry(place, by_tensor.pop(number)) if number in by_tensor else _empty(place)
    return entries, counts


def _not_tiled(place: Place, what: str) -> CheckpointError:
    return CheckpointError(
        "The pieces of all ranks do not cover a tensor exactly once",
        where=place.spec.name,
        found=what,
        fix="Nothing was committed; this is a defect of the program that enumerates the shards.",
    )


def _read(tables: Sequence[bytes], counts: list[int]) -> Iterator[tuple[int, _Pieces]]:
    """Yield the pieces of tables by tensor and in order, and add the number of blocks of each table to `counts`."""
    data = np.frombuffer(b"".join(tables), dtype=np.uint8)
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    ends = np.cumsum(sizes)
    at, rows = ends - sizes, np.arange(len(tables))
    places, owners = [], []
    while (is_left := at < ends).any():  # the next piece of every table that has one
        at, ends, rows = at[is_left], ends[is_left], rows[is_left]
        places.append(at)
        owners.append(rows)
        at = at + PIECE.size + 16 * data[at + 4].astype(np.int64)
    if not places:
        counts.extend([0] * len(tables))
        return
    starts, of_table = np.concatenate(places), np.concatenate(owners)
    order = np.argsort(starts)
    starts, of_table = starts[order], of_table[order]
    heads = data[starts[:, None] + np.arange(PIECE.size)].view(_HEAD)[:, 0]
    blocks = heads["blocks"].astype(np.int64)
    first_blocks = sum(counts) + np.cumsum(blocks) - blocks
    counts.extend(np.bincount(of_table, weights=blocks, minlength=len(tables)).astype(np.int64).tolist())
    order = np.argsort(heads["tensor"], kind="stable")
    numbers = heads["tensor"][order]
    for members in np.split(order, np.flatnonzero(numbers[1:] != numbers[:-1]) + 1):
        number = int(heads["tensor"][members[0]])
        dims = int(heads["dims"][members[0]])
        places_of_boxes = starts[members][:, None] + np.arange(PIECE.size, PIECE.size + 16 * dims)
        boxes = data.take(places_of_boxes, mode="clip").view("<i8")  # of other dimensions, a piece is refused later
        yield number, _Pieces(heads[members], boxes, first_blocks[members])


def _empty(place: Place) -> TensorEntry:
    """Return the entry of a tensor without bytes."""
    return TensorEntry(place.spec.view, tuple(tuple(sorted({0, size})) for size in place.spec.view), {}, b"")


def _entry(place: Place, parts: Sequence[_Pieces]) -> TensorEntry:
    """Return the entry of a tensor.

    Raises:
        CheckpointError: if its pieces do not tile it.
    """
    dims = len(place.spec.view)
    if any((part.heads["dims"] != dims).any() for part in parts):
        raise _not_tiled(place, f"a piece that has not {dims} dimensions")
    heads = np.concatenate([part.heads for part in parts])
    boxes = np.concatenate([part.boxes for part in parts])
    first_blocks = np.concatenate([part.first_blocks for part in parts])
    lo, hi, blocks = heads["lo"], heads["hi"], heads["blocks"].astype(np.int64)
    if (lo >= hi).any() or (blocks != -(-(hi - lo) // BLOCK_BYTES)).any():
        raise _not_tiled(place, "a piece without bytes, or with another number of blocks")
    cuts, cell, total = _cells(place, boxes)
    order = np.lexsort((lo, cell))
    cell, lo, hi, total = cell[order], lo[order], hi[order], total[order]
    is_first = np.append(True, cell[1:] != cell[:-1])
    is_last = np.append(is_first[1:], True)
    count = math.prod(len(marks) - 1 for marks in cuts)
    has_gaps = (lo != np.where(is_first, 0, np.append(0, hi[:-1]))).any() or (hi[is_last] != total[is_last]).any()
    if int(is_first.sum()) != count or has_gaps:
        raise _not_tiled(place, "bytes that no piece has, or two")
    shares: dict[int, list[int]] = {}
    for number, offset in zip(cell[~is_first].tolist(), lo[~is_first].tolist(), strict=True):
        shares.setdefault(number, []).append(offset)
    blocks = blocks[order]
    ends = np.cumsum(blocks)
    numbers = np.repeat(first_blocks[order] - (ends - blocks), blocks) + np.arange(ends[-1])
    in_order = {number: tuple(offsets) for number, offsets in shares.items()}
    return TensorEntry(place.spec.view, cuts, in_order, numbers.astype("<u8").tobytes())


def _cells(place: Place, boxes: _Integers) -> tuple[tuple[tuple[int, ...], ...], _Integers, _Integers]:
    """Return the cuts of a tensor, and the number and bytes of the cell of each box.

    Raises:
        CheckpointError: if a box is no cell.
    """
    cell, total = np.zeros(len(boxes), dtype=np.int64), np.full(len(boxes), place.spec.dtype.itemsize)
    cuts = []
    for dim, size in enumerate(place.spec.view):
        begin, length = boxes[:, dim], boxes[:, len(place.spec.view) + dim]
        end = begin + length
        if (begin < 0).any() or (length <= 0).any() or (length > size - begin).any():  # `end` may overflow
            raise _not_tiled(place, "a box outside the tensor")
        marks = np.sort(np.concatenate([[0, size], begin, end]))
        marks = marks[np.append(True, marks[1:] != marks[:-1])]  # `np.unique` would keep other threads waiting
        index = np.searchsorted(marks, begin)
        if (marks[index + 1] != end).any():
            raise _not_tiled(place, "boxes that overlap")
        cell, total = cell * (len(marks) - 1) + index, total * length
        cuts.append(tuple(marks.tolist()))
    return tuple(cuts), cell, total
