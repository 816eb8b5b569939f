"""Splits pieces into blocks, each with its own digest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import xxhash

from reprise.errors import CheckpointError
from reprise.format.box import Image, whole
from reprise.format.host_file import PieceNumbers
from reprise.format.layout import MOST_ELEMENTS, Place
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES, WrittenPiece
from reprise.loading.reader import Bytes, Checkpoint, OpenFile, read_places


@dataclass(frozen=True, slots=True)
class PieceBlock:
    """Bytes `[lo, hi)` in a piece's packed image, with their hexadecimal digest.

    Args:
        number: The piece's number in its tensor.
        into: The memory to read it into directly. None for a buffer.
        move: Copies the bytes that are needed from the buffer, and returns their count. None only verifies the block.
    """

    place: Place
    number: int
    packed: Image
    lo: int
    hi: int
    digest: str
    into: Bytes | None = None
    move: Callable[[Bytes], int] | None = None

    def __str__(self) -> str:
        return f"{self.place.file}, {self._in_file}"

    @property
    def _in_file(self) -> str:
        ranges = ", ".join(f"{part.start}:{part.stop}" for part in self.packed.box.slices)
        part = f" of elements [{ranges}]" if self.packed.total_bytes < self.place.spec.total_bytes else ""
        return f"tensor {self.place.spec.name}, bytes [{self.lo}, {self.hi}){part}"

    def read(self, file: OpenFile, into: Bytes) -> None:
        """Fill an array with the bytes, and compare them with their digest.

        Raises:
            CheckpointError: The digest differs. Names the file, tensor and byte range.
        """
        digest, step = xxhash.xxh3_64(), file.files.step_bytes if self.packed.is_contiguous else into.size
        for at in range(0, into.size, step):
            part = into[at : at + step]
            file.gather(self.packed, self.lo + at, part, offset=self.place.offset)
            digest.update(part.data)
        if (actual := digest.hexdigest()) != self.digest:
            raise CheckpointError(
                "A tensor is damaged",
                where=f"{file.path}, {self._in_file}",
                expected=f"digest {self.digest}",
                found=actual,
                fix="Load another iteration; this one cannot be trusted.",
            )


def blocks_of(checkpoint: Checkpoint, pieces: Mapping[str, Collection[int]]) -> Iterator[PieceBlock]:
    """Yield these pieces' blocks in file order, which is the same on every host.

    Args:
        pieces: By tensor, its piece numbers. A range is not expanded, since a range for all pieces is huge.

    Raises:
        CheckpointError: See `read_places`.
    """
    places = read_places(checkpoint)
    for place in sorted((places[name] for name in pieces), key=lambda place: (place.file, place.offset)):
        spec, numbers = place.spec, pieces[place.spec.name]
        selected = numbers if isinstance(numbers, range) else frozenset(numbers)
        for number, piece in checkpoint.manifest.tensors[spec.name].pieces_in(whole(spec.view), spec.dtype.itemsize):
            if number not in selected:
                continue
            yield from blocks_in(place, number, piece)


def blocks_in(
    place: Place, number: int, piece: WrittenPiece, *, begin: int = 0, end: int = MOST_ELEMENTS
) -> Iterator[PieceBlock]:
    """Yield a piece's blocks with a byte in `[begin, end)`, in order. By default yield all blocks."""
    packed, skipped = place.spec.image(piece.box), max(0, begin - piece.lo) // BLOCK_BYTES
    for lo in range(piece.lo + skipped * BLOCK_BYTES, min(piece.hi, end), BLOCK_BYTES):
        at = (lo - piece.lo) // BLOCK_BYTES * DIGEST_BYTES
        hi, digest = min(lo + BLOCK_BYTES, piece.hi), piece.digests[at : at + DIGEST_BYTES].hex()
        yield PieceBlock(place, number, packed, lo, hi, digest)


def bytes_of(checkpoint: Checkpoint, pieces: PieceNumbers) -> int:
    """Return these pieces' size in bytes."""
    return sum(block.hi - block.lo for block in blocks_of(checkpoint, pieces))
