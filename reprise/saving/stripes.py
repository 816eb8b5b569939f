"""The layout of stripes: extents of a tensor whose columns the ranks of one host hold together. Pure arithmetic.

A rank that holds columns of a tensor has a short run of bytes in every row. The ranks of one host assemble these runs
in shared memory (`column_sharing.py`) and write each full stripe in one call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reprise.format.box import Image
from reprise.format.layout import PAGE_BYTES, Layout
from reprise.saving.chunks import Piece

STRIPE_BYTES = 4 << 20
# The shared memory starts with a page that holds its name, then a 4-byte counter for each stripe.
MAX_STRIPES = 1 << 16
COUNTERS_AT = PAGE_BYTES
STRIPES_AT = COUNTERS_AT + 4 * MAX_STRIPES


@dataclass(frozen=True, slots=True)
class Stripe:
    """Bytes `[lo, hi)` of a tensor, all of them held on this host.

    Args:
        place: offset in the shared memory, congruent to the offset in the file modulo a page.
    """

    number: int
    lo: int
    hi: int
    place: int

    @property
    def size(self) -> int:
        return self.hi - self.lo


Stripes = Mapping[str, Sequence[Stripe]]  # by tensor, in the tensor's order


def stripes_of(pieces: Sequence[Piece], layout: Layout) -> Stripes:
    """Return the stripes that these pieces fill completely. The result depends on the set of pieces only.

    Args:
        pieces: the strided pieces of all ranks of the host, in any order.
    """
    filled: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for piece in pieces:
        place = layout.places[piece.name]
        for number, count in _shares(piece, place.spec.image(piece.box), place.offset):
            filled[piece.name][number] += count
    stripes: dict[str, list[Stripe]] = {}
    number, end = 0, STRIPES_AT
    for name in sorted(filled):
        place = layout.places[name]
        for index, count in sorted(filled[name].items()):
            lo = max(0, index * STRIPE_BYTES - place.offset)
            hi = min(place.spec.total_bytes, (index + 1) * STRIPE_BYTES - place.offset)
            if count == hi - lo and number < MAX_STRIPES:
                start = end + (place.offset + lo - end) % PAGE_BYTES
                stripes.setdefault(name, []).append(Stripe(number, lo, hi, start))
                number, end = number + 1, start + hi - lo
    return stripes


def shared_bytes(stripes: Stripes) -> int:
    """Return the size in bytes of the memory that holds all stripes."""
    return max(
        (stripe.place + stripe.size for stripes_of_tensor in stripes.values() for stripe in stripes_of_tensor),
        default=STRIPES_AT,
    )


def cut_by_stripes(
    packed: Image, lo: int, hi: int, stripes: Sequence[Stripe]
) -> Iterator[tuple[int, int, Stripe | None]]:
    """Split bytes `[lo, hi)` of a packed image into extents, in order, each with its stripe or None."""
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
    """Yield the number of each stripe of the file that a piece overlaps, with the bytes of the piece in it."""
    first = (at + packed.start) // STRIPE_BYTES
    last = (at + packed.start + packed.extent - 1) // STRIPE_BYTES
    for number in range(first, last + 1):
        lo = max(piece.lo, packed.before(number * STRIPE_BYTES - at))
        hi = min(piece.hi, packed.before((number + 1) * STRIPE_BYTES - at))
        if lo < hi:
            yield number, hi - lo
