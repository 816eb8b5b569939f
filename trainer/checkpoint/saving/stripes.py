"""Which extents of tensors the ranks of one host hold together, each of them only columns. Pure arithmetic.

A rank that holds columns has short runs of every row. Ranks of one host put theirs together in memory that they share,
and a full stripe is written in one call. `column_sharing.py` fills them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.checkpoint.format.box import Image
from trainer.checkpoint.format.layout import PAGE_BYTES, Layout
from trainer.checkpoint.saving.chunks import Piece

STRIP_BYTES = 4 << 20
# The shared memory begins with a page that names it and a counter of four bytes for each stripe.
MOST_STRIPS = 1 << 16
COUNTERS_AT = PAGE_BYTES
STRIPS_AT = COUNTERS_AT + 4 * MOST_STRIPS


@dataclass(frozen=True, slots=True)
class Stripe:
    """Bytes `[lo, hi)` of a tensor, all of them held on this host.

    Args:
        place: where the shared memory has them, on the same ground modulo a page as the file.
    """

    number: int
    lo: int
    hi: int
    place: int

    @property
    def size(self) -> int:
        return self.hi - self.lo


Strips = Mapping[str, Sequence[Stripe]]  # by tensor, in the tensor's order


def stripes_of(pieces: Sequence[Piece], layout: Layout) -> Strips:
    """Return the stripes that these pieces fill to the last byte, and nobody else's: the same for the same pieces.

    Args:
        pieces: those of all ranks of the host that have rows apart in the tensor, in any order.
    """
    filled: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for piece in pieces:
        place = layout.places[piece.name]
        for number, count in _shares(piece, place.spec.image(piece.box), place.offset):
            filled[piece.name][number] += count
    found: dict[str, list[Stripe]] = {}
    number, end = 0, STRIPS_AT
    for name in sorted(filled):
        place = layout.places[name]
        for index, count in sorted(filled[name].items()):
            lo = max(0, index * STRIP_BYTES - place.offset)
            hi = min(place.spec.total_bytes, (index + 1) * STRIP_BYTES - place.offset)
            if count == hi - lo and number < MOST_STRIPS:
                start = end + (place.offset + lo - end) % PAGE_BYTES
                found.setdefault(name, []).append(Stripe(number, lo, hi, start))
                number, end = number + 1, start + hi - lo
    return found


def shared_bytes(stripes: Strips) -> int:
    """Return the size of the memory that has room for all stripes."""
    return max((stripe.place + stripe.size for found in stripes.values() for stripe in found), default=STRIPS_AT)


def cut_by_stripes(
    packed: Image, lo: int, hi: int, stripes: Sequence[Stripe]
) -> Iterator[tuple[int, int, Stripe | None]]:
    """Yield bytes `[lo, hi)` of a packed image in extents, in order, each with the stripe it goes to, or None."""
    for stripe in stripes:
        first, last = max(lo, packed.before(stripe.lo)), min(hi, packed.before(stripe.hi))
        if first >= last:
            continue
        if lo < first:
            yield lo, first, None
        yield first, last, stripe
        lo = last
    if lo < hi:
        yield lo, hi, None


def _shares(piece: Piece, packed: Image, at: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of the extents of the file that a piece reaches, and how many of its bytes lie in each."""
    first = (at + packed.start) // STRIP_BYTES
    last = (at + packed.start + packed.extent - 1) // STRIP_BYTES
    for number in range(first, last + 1):
        lo = max(piece.lo, packed.before(number * STRIP_BYTES - at))
        hi = min(piece.hi, packed.before((number + 1) * STRIP_BYTES - at))
        if lo < hi:
            yield number, hi - lo
