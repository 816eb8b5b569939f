"""The manifest of a checkpoint: sizes and digests of everything in the folder, and the tiling pieces of each tensor.

Digests are `xxh3_64` (https://github.com/Cyan4973/xxHash) as 16 hex digits.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from reprise import json_file
from reprise.errors import CheckpointError
from reprise.format.box import Box, image, whole
from reprise.format.layout import DTYPE_NAMES, MOST_DIMENSIONS, Layout, Place
from reprise.format.names import MANIFEST_FORMAT
from reprise.json_file import integer

FORMAT = MANIFEST_FORMAT
BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 8
MOST_ELEMENTS = 2**63 - 1  # what a size of torch's holds
_ITEMSIZES = sorted({dtype.itemsize for dtype in DTYPE_NAMES})


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A piece in a rank's report: bytes `[lo, hi)` of the packed image of `box`, and its packed block digests."""

    name: str
    box: Box
    lo: int
    hi: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """A rank's share of a save: its pieces, and the tensor bytes it wrote.

    The two may differ on a rank, because ranks of a host write for each other; their sums over all ranks are equal.
    """

    pieces: list[WrittenPiece]
    total_bytes: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size of a file in bytes, and the digest of its safetensors header or, for any other file, of its content."""

    total_bytes: int
    digest: str
    is_tensor_file: bool


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The pieces of a tensor: `cuts` per dimension of `view` form a product grid of cells, in C order.

    A cell in `shares` was written by several replicas, cut at these byte offsets of its packed image. `digests` holds
    the block digests of all pieces in order, eight bytes each, big-endian.
    """

    view: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    shares: Mapping[int, tuple[int, ...]]
    digests: bytes

    def pieces(self, itemsize: int) -> Iterator[WrittenPiece]:
        """Yield every piece with its digests."""
        position = 0
        for cell, box in enumerate(_cells(self.cuts)):
            total = image(box, self.view, itemsize).total_bytes
            bounds = (0, *self.shares.get(cell, ()), total)
            for lo, hi in itertools.pairwise(bounds):
                length = block_count(hi - lo) * DIGEST_BYTES
                yield WrittenPiece("", box, lo, hi, self.digests[position : position + length])
                position += length

    def fits(self, itemsize: int) -> bool:
        """Return whether shares and the number of digests fit a tensor with items of `itemsize` bytes."""
        count, cells = 0, math.prod(len(marks) - 1 for marks in self.cuts)
        if cells * DIGEST_BYTES > len(self.digests):  # a cell has at least one; no tensor is worth counting more
            return False
        for cell, box in enumerate(_cells(self.cuts)):
            bounds = (0, *self.shares.get(cell, ()), image(box, self.view, itemsize).total_bytes)
            if len(bounds) > 2 and any(lo >= hi for lo, hi in itertools.pairwise(bounds)):
                return False
            count += sum(block_count(hi - lo) for lo, hi in itertools.pairwise(bounds))
        return len(self.digests) == count * DIGEST_BYTES and all(0 <= cell < cells for cell in self.shares)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything needed to check a checkpoint folder; `aliases` maps a tied name to the stored name."""

    attempt: str
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]


def digest_of(data: bytes | memoryview) -> str:
    """Return the `xxh3_64` digest of `data` as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def is_shape(sizes: Sequence[int]) -> bool:
    """Return whether a tensor can have these sizes: limits on the number of dimensions and elements hold."""
    if len(sizes) > MOST_DIMENSIONS or any(size > MOST_ELEMENTS for size in sizes):
        return False
    return math.prod(sizes) <= MOST_ELEMENTS


def block_count(total_bytes: int) -> int:
    """Return how many blocks a piece of `total_bytes` has."""
    return -(-total_bytes // BLOCK_BYTES)


def tile(layout: Layout, pieces: Sequence[WrittenPiece]) -> dict[str, TensorEntry]:
    """Check that the pieces cover every byte of every tensor exactly once, and return each tensor's entry.

    Raises:
        CheckpointError: naming the first tensor with a missing, duplicate or unknown piece, or with a wrong number of
            digests.
    """
    by_name: dict[str, list[WrittenPiece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.name].append(piece)
        expected = block_count(piece.hi - piece.lo) * DIGEST_BYTES
        if len(piece.digests) != expected:
            raise CheckpointError(
                "A written piece has not one digest for each of its blocks",
                where=f"{piece.name}, bytes [{piece.lo}, {piece.hi}) of the box at {list(piece.box.offset)}",
                expected=f"{expected} B",
                found=f"{len(piece.digests)} B",
                fix="Nothing was committed; this is a defect of the program that wrote it.",
            )
    foreign = by_name.keys() - layout.places.keys()
    if foreign:
        raise CheckpointError("A piece of an unknown tensor was written", where=min(foreign))
    return {name: _tile_tensor(place, by_name.get(name, [])) for name, place in layout.places.items()}


def _tile_tensor(place: Place, pieces: list[WrittenPiece]) -> TensorEntry:
    spec = place.spec
    if len(pieces) == 1 and spec.total_bytes and pieces[0].box == whole(spec.view):
        (piece,) = pieces
        if (piece.lo, piece.hi) == (0, spec.total_bytes):  # as nearly all pieces of a single rank
            return TensorEntry(spec.view, tuple((0, size) for size in spec.view), {}, piece.digests)
    cuts = []
    for dim, size in enumerate(spec.view):
        marks = {piece.box.offset[dim] for piece in pieces} | {piece.box.end[dim] for piece in pieces}
        cuts.append(tuple(sorted(marks | {0, size})))
    by_box: dict[Box, list[WrittenPiece]] = defaultdict(list)
    for piece in pieces:
        by_box[piece.box].append(piece)
    shares: dict[int, tuple[int, ...]] = {}
    digests: list[bytes] = []
    for cell, box in enumerate(_cells(cuts)):
        total = spec.image(box).total_bytes
        members = sorted(by_box.pop(box, []), key=lambda p: p.lo)
        bounds = [piece.lo for piece in members] + [total]
        if total and (not members or bounds[0] != 0 or [p.hi for p in members] != bounds[1:]):
            raise _not_tiled(spec.name, box, members)
        if len(members) > 1:
            shares[cell] = tuple(bounds[1:-1])
        digests += [piece.digests for piece in members]
    if by_box:
        box, members = next(iter(by_box.items()))
        raise _not_tiled(spec.name, box, members)
    return TensorEntry(spec.view, tuple(cuts), shares, b"".join(digests))


def _not_tiled(name: str, box: Box, members: Sequence[WrittenPiece]) -> CheckpointError:
    return CheckpointError(
        "The written pieces do not cover a tensor exactly once",
        where=f"{name}, box at {list(box.offset)} of {list(box.shape)}",
        found="bytes " + (", ".join(f"[{p.lo}, {p.hi})" for p in members) or "none"),
        fix="Nothing was committed; this is a defect of the program that enumerates the shards.",
    )


def _cells(cuts: Sequence[Sequence[int]]) -> Iterator[Box]:
    for cell in itertools.product(*(itertools.pairwise(marks) for marks in cuts)):
        yield Box(tuple(lo for lo, _ in cell), tuple(hi - lo for lo, hi in cell))


def to_bytes(manifest: Manifest) -> bytes:
    """Return the JSON form; its last member is the digest of all bytes before its comma."""
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
        MismatchError: if it has another format version.
        CheckpointError: if it is damaged or inconsistent.
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
        files[_inside(name)] = FileEntry(_size(entry["bytes"]), str(digest), is_tensor_file)
    if sum(entry.total_bytes for entry in files.values() if not entry.is_tensor_file) > json_file.MAX_BYTES:
        raise ValueError(f"the files that hold no tensors are larger than {json_file.MAX_BYTES} B")
    tensors = {name: _tensor_entry(entry) for name, entry in table["tensors"].items()}
    return Manifest(str(table["attempt"]), files, tensors, dict(table["aliases"]))


def _tensor_entry(entry: Mapping[str, Any]) -> TensorEntry:
    view = tuple(_size(n) for n in entry["view"])
    if not is_shape(view):
        raise ValueError(f"a view of {len(view)} dimensions has more of them, or of elements, than a tensor can")
    cuts = tuple(tuple(_size(n) for n in marks) for marks in entry["cuts"])
    if len(cuts) != len(view) or any(
        marks[0] != 0 or marks[-1] != n or list(marks) != sorted(set(marks))
        for marks, n in zip(cuts, view, strict=True)
    ):
        raise ValueError(f"cuts {cuts} do not fit a tensor of {view}")
    shares = {_cell(key): tuple(_size(n) for n in offsets) for key, offsets in entry.get("shares", {}).items()}
    parsed = TensorEntry(view, cuts, shares, bytes.fromhex(entry["digests"]))
    # Only the headers know the item size; `reader.read_places` asks again with it.
    if not any(parsed.fits(itemsize) for itemsize in _ITEMSIZES):
        raise ValueError(
            f"{len(parsed.digests)} B of digests and shares {shares} fit no tensor of {view} cut at {cuts}"
        )
    return parsed


def _size(value: object) -> int:
    return integer(value, most=MOST_ELEMENTS)


def _cell(key: str) -> int:
    cell = int(key)
    if str(cell) != key:
        raise ValueError(f"{key!r} is no number of a cell")
    return cell


def _inside(name: str) -> str:
    """Return `name` if it is a relative path within the folder."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or "\0" in name or any(p in ("", ".", "..") for p in parts):
        raise ValueError(f"the file name {name!r} leaves the folder")
    return name
