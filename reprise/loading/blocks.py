"""The blocks of pieces: each has a digest of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from reprise.format.box import Image
from reprise.format.host_file import PieceNumbers
from reprise.format.layout import Place
from reprise.format.manifest import DIGEST_BYTES, block_ranges
from reprise.loading.reader import Checkpoint


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
            packed = spec.image(piece.box)
            for index, (lo, hi) in enumerate(block_ranges(piece.lo, piece.hi)):
                digest = piece.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES].hex()
                yield PieceBlock(place, number, packed, lo, hi, digest)


def bytes_of(checkpoint: Checkpoint, places: Mapping[str, Place], pieces: PieceNumbers) -> int:
    """Return the size of these pieces in bytes."""
    return sum(block.hi - block.lo for block in blocks_of(checkpoint, places, pieces))
