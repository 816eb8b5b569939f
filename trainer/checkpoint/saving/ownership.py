"""Which rank writes which bytes: every byte of every tensor has exactly one writer.

Ranks that hold the same box are replicas of each other. They lay their common boxes end to end and each takes an equal
extent of that line, so the load is level to a page however many replicas there are, and each rank writes long runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from trainer.checkpoint.format.box import Box, Image
from trainer.checkpoint.format.layout import PAGE_BYTES

# Below this a tensor goes whole to one replica: a cut would cost more than the imbalance.
SMALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Holding:
    """A box that a rank holds: `offset` is the tensor's place in its file, `replicas` all ranks that hold this box."""

    name: str
    image: Image
    offset: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box, or a share of one, with one writer: bytes `[lo, hi)` of the packed image of `box`."""

    name: str
    box: Box
    lo: int
    hi: int


def pieces_of(holdings: Sequence[Holding], rank: int) -> list[Piece]:
    """Return the pieces that `rank` writes, in the order of `holdings`.

    Pure, and equal on all replicas: each sees the same common boxes in the same order, whatever else it holds.
    """
    mine: dict[str, Piece] = {}
    for replicas, members in _groups(holdings).items():
        for piece in _extent(members, index=replicas.index(rank), count=len(replicas)):
            mine[piece.name] = piece
    return [mine[holding.name] for holding in holdings if holding.name in mine]


def shared_pieces(holdings: Sequence[Holding]) -> dict[tuple[int, ...], dict[str, list[Piece]]]:
    """Return, for each set of two or more ranks with boxes in common, the pieces of these boxes, whoever writes them.

    Pure, and equal on all these ranks.

    Returns:
        By the ranks, then by tensor in the order of `holdings`: the pieces in the order of their bytes.
    """
    found: dict[tuple[int, ...], dict[str, list[Piece]]] = {}
    for replicas, members in _groups(holdings).items():
        if len(replicas) > 1:
            by_name: dict[str, list[Piece]] = {member.name: [] for member in members}
            for index in range(len(replicas)):
                for piece in _extent(members, index=index, count=len(replicas)):
                    by_name[piece.name].append(piece)
            found[replicas] = by_name
    return found


def _groups(holdings: Sequence[Holding]) -> dict[tuple[int, ...], list[Holding]]:
    """Return the holdings that are not empty, by the ranks that share them."""
    groups: dict[tuple[int, ...], list[Holding]] = defaultdict(list)
    for holding in holdings:
        if holding.image.total_bytes:
            groups[holding.replicas].append(holding)
    return groups


def _extent(members: list[Holding], *, index: int, count: int) -> list[Piece]:
    starts = [0, *accumulate(holding.image.total_bytes for holding in members)]
    first = _boundary(members, starts, index=index, count=count)
    last = _boundary(members, starts, index=index + 1, count=count)
    if first == last:
        return []
    pieces = []
    for at in range(bisect_right(starts, first) - 1, bisect_left(starts, last)):
        lo, hi = max(first, starts[at]) - starts[at], min(last, starts[at + 1]) - starts[at]
        pieces.append(Piece(members[at].name, members[at].image.box, lo, hi))
    return pieces


def _boundary(members: list[Holding], starts: list[int], *, index: int, count: int) -> int:
    """Return where extent `index` begins on the line: rounded down to a page of the file, a row, or a small tensor."""
    target = starts[-1] * index // count
    if target == starts[-1]:
        return target
    at = bisect_right(starts, target) - 1
    holding, inside = members[at], target - starts[at]
    if holding.image.total_bytes < SMALL_BYTES:
        return starts[at]
    if holding.image.is_contiguous:
        in_file = holding.offset + next(holding.image.spans(0, 1))[0]
        return starts[at] + max(0, (in_file + inside) // PAGE_BYTES * PAGE_BYTES - in_file)
    return starts[at] + inside // holding.image.run_bytes * holding.image.run_bytes
