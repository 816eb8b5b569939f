"""The blocks of pieces: each has a digest of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from reprise.errors import CheckpointError
from reprise.format.box import Image
from reprise.format.host_file import PieceNumbers
from reprise.format.layout import Place
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES, WrittenPiece, block_ranges, digest_of
from reprise.loading.reader import Bytes, Checkpoint, Gatherer, OpenFile, open_tensor_file


@dataclass(frozen=True, slots=True)
class PieceBlock:
    """Bytes `[lo, hi)` of the packed image of a piece, with their digest in hexadecimal.

    Args:
        number: of the piece in its tensor.
    """

    place: Place
    number: int
    packed: Image
    lo: int
    hi: int
    digest: str

    def __str__(self) -> str:
        return f"{self.place.file}, tensor {self.place.spec.name}, bytes [{self.lo}, {self.hi}) of a piece"

    def read(
        self, checkpoint: Checkpoint, file: OpenFile, gatherer: Gatherer, into: Bytes, *, verify: bool = True
    ) -> None:
        """Fill an array with the bytes, and compare them with their digest.

        Raises:
            CheckpointError: naming the file, the tensor and the byte range.
        """
        gatherer.gather(file.read, self.packed, self.lo, into, offset=self.place.offset)
        if verify and (actual := digest_of(into.data)) != self.digest:
            raise CheckpointError(
                "A tensor is damaged",
                where=f"{checkpoint.path}/{self}",
                expected=f"digest {self.digest}",
                found=actual,
                fix="Load another iteration; this one cannot be trusted.",
            )


def blocks_of(
    checkpoint: Checkpoint, places: Mapping[str, Place], pieces: Mapping[str, Collection[int]]
) -> Iterator[PieceBlock]:
    """Yield the blocks of these pieces in the order of the files, the same on every host.

    Args:
        pieces: by tensor, the numbers of its pieces; a range stays a range, since a whole tensor's has no end.
    """
    for place in sorted((places[name] for name in pieces), key=lambda place: (place.file, place.offset)):
        spec, numbers = place.spec, pieces[place.spec.name]
        selected = numbers if isinstance(numbers, range) else frozenset(numbers)
        for number, piece in enumerate(checkpoint.manifest.tensors[spec.name].pieces(spec.dtype.itemsize)):
            if number not in selected:
                continue
            yield from blocks_in(place, number, piece)


def blocks_in(
    place: Place, number: int, piece: WrittenPiece, *, begin: int = 0, end: int | None = None
) -> Iterator[PieceBlock]:
    """Yield the blocks of a piece with a byte of `[begin, end)` in order; by default all."""
    packed = place.spec.image(piece.box)
    for lo, hi in block_ranges(piece.lo, piece.hi, begin=begin, end=end):
        at = (lo - piece.lo) // BLOCK_BYTES * DIGEST_BYTES
        yield PieceBlock(place, number, packed, lo, hi, piece.digests[at : at + DIGEST_BYTES].hex())


def check_first_blocks(checkpoint: Checkpoint, places: Mapping[str, Place]) -> None:
    """Check the first block of each tensor file, which a file of another iteration has the same size and header of.

    Raises:
        CheckpointError: naming the file, the tensor and the byte range.
    """
    first = dict[str, Place]()
    for place in sorted(places.values(), key=lambda place: place.offset, reverse=True):
        if place.spec.total_bytes and 0 in checkpoint.held(place.spec.name):
            first[place.file] = place

    def check(place: Place) -> None:
        block = next(blocks_of(checkpoint, places, {place.spec.name: range(1)}))
        with open_tensor_file(checkpoint.files, checkpoint.path / place.file) as file:
            block.read(checkpoint, file, Gatherer(), np.empty(block.hi - block.lo, np.uint8))

    for _ in checkpoint.files.map(check, first.values()):
        pass


def bytes_of(checkpoint: Checkpoint, places: Mapping[str, Place], pieces: PieceNumbers) -> int:
    """Return the size of these pieces in bytes."""
    return sum(block.hi - block.lo for block in blocks_of(checkpoint, places, pieces))
