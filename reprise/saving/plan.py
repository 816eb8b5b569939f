"""Plans the saves of a rank: which bytes it writes, and in which chunks. Made again only if a tensor moves.

Every byte of every tensor has exactly one writer. Ranks that hold the same box are replicas of each other. They lay
their common boxes end to end and each takes an equal share of that line, so the load is level to a page however many
replicas there are, and each rank writes long runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from reprise.format.box import Image
from reprise.format.layout import PAGE_BYTES, Layout, TensorSpec, build_layout
from reprise.saving.chunks import Chunk, Piece, cut
from reprise.saving.replica_digests import SharedPieces
from reprise.tensors.live import Contents, LiveTensor, storages_of
from reprise.tensors.memory import Sources

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
class Plan:
    """All that is known of a save before it begins, and is the same for the next one of the same tensors.

    Args:
        chunks: by file, in extents that may be written at once. The files come in an order that is rotated by rank,
            so that ranks do not queue for one.
        columns: the pieces whose rows lie apart in their file.
        shared: the pieces, of any rank, of the boxes that several ranks hold, this one among them.
        watched: the memory of those of them that this rank writes nothing of.
        is_overtaken: whether the program changes the tensors while the save is under way.
    """

    specs: tuple[TensorSpec, ...]
    live: tuple[LiveTensor, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    layout: Layout
    pieces: list[Piece]
    chunks: dict[str, list[list[Chunk]]]
    columns: list[Piece]
    sources: Sources
    shared: SharedPieces
    watched: Sources
    is_overtaken: bool = False

    def suits(self, contents: Contents) -> bool:
        """Return whether `contents` are the very same tensors."""
        is_same = self.specs is contents.specs and self.live is contents.live
        return is_same and self.optimizers == contents.optimizers

    @property
    def order(self) -> list[Chunk]:
        """Return the chunks in the order in which they are written, about."""
        return [chunk for extents in self.chunks.values() for extent in extents for chunk in extent]

    @property
    def staging_bytes(self) -> int:
        """Return the memory that takes a copy of every chunk."""
        return sum(chunk.size + PAGE_BYTES for chunk in self.order)


def make_plan(
    contents: Contents, *, rank: int, file_bytes: int, is_overtaken: bool, copies_at_call: bool = False
) -> Plan:
    """Plan the saves of `contents`.

    Args:
        is_overtaken: whether the program changes the tensors while the save is under way; else all memory stays as it
            is until the save is over.
        copies_at_call: whether no memory changes before the snapshot is released; else only the memory that steps of
            `contents.optimizers` change is steady until then.
    """
    layout = build_layout(contents.specs, file_bytes=file_bytes)
    pieces = plan(contents.live, layout, rank)
    shared = shared_pieces(_holdings(contents.live, layout))
    names = {piece.name for piece in pieces}
    watched = {name for tensors in shared.values() for name in tensors} - names
    is_steady = copies_at_call or not is_overtaken
    steady = None if is_steady else storages_of(contents.optimizers, contents.constant)
    chunks = _rotated(cut(pieces, layout), rank)
    return Plan(
        specs=contents.specs,
        live=contents.live,
        optimizers=contents.optimizers,
        layout=layout,
        pieces=pieces,
        chunks=chunks,
        columns=columns_of(chunks),
        sources=Sources(_named(contents.live, names), steady),
        shared=shared,
        watched=Sources(_named(contents.live, watched), steady),
        is_overtaken=is_overtaken,
    )


def _named(live: Sequence[LiveTensor], names: Collection[str]) -> list[LiveTensor]:
    return [tensor for tensor in live if tensor.spec.name in names and not tensor.is_copy]


def columns_of(chunks: Mapping[str, Sequence[Sequence[Chunk]]]) -> list[Piece]:
    """Return the pieces whose rows lie apart in their file."""
    extents = itertools.chain(*chunks.values())
    return list({chunk.parts[0].piece: None for chunk in itertools.chain(*extents) if chunk.strided is not None})


def _rotated(chunks: dict[str, list[list[Chunk]]], rank: int) -> dict[str, list[list[Chunk]]]:
    names = list(chunks)
    turn = rank % max(1, len(names))
    return {name: chunks[name] for name in names[turn:] + names[:turn]}


def plan(live: Sequence[LiveTensor], layout: Layout, rank: int) -> list[Piece]:
    """Return the pieces that `rank` writes."""
    return pieces_of(_holdings(live, layout), rank)


def _holdings(live: Sequence[LiveTensor], layout: Layout) -> list[Holding]:
    return [
        Holding(spec.name, spec.image(tensor.box), layout.places[spec.name].offset, tensor.replicas)
        for tensor in live
        if not tensor.is_copy
        for spec in (tensor.spec,)
    ]


def pieces_of(holdings: Sequence[Holding], rank: int) -> list[Piece]:
    """Return the pieces that `rank` writes, in the order of `holdings`.

    Pure, and equal on all replicas: each sees the same common boxes in the same order, whatever else it holds.
    """
    by_name: dict[str, Piece] = {}
    for replicas, members in _groups(holdings).items():
        for piece in _share(members, index=replicas.index(rank), count=len(replicas)):
            by_name[piece.name] = piece
    return [by_name[holding.name] for holding in holdings if holding.name in by_name]


def shared_pieces(holdings: Sequence[Holding]) -> dict[tuple[int, ...], dict[str, list[Piece]]]:
    """Return, for each set of two or more ranks with boxes in common, the pieces of these boxes, by any writer.

    Pure, and equal on all these ranks.

    Returns:
        By the ranks, then by tensor in the order of `holdings`: the pieces in the order of their bytes.
    """
    by_ranks: dict[tuple[int, ...], dict[str, list[Piece]]] = {}
    for replicas, members in _groups(holdings).items():
        if len(replicas) > 1:
            by_name: dict[str, list[Piece]] = {member.name: [] for member in members}
            for index in range(len(replicas)):
                for piece in _share(members, index=index, count=len(replicas)):
                    by_name[piece.name].append(piece)
            by_ranks[replicas] = by_name
    return by_ranks


def _groups(holdings: Sequence[Holding]) -> dict[tuple[int, ...], list[Holding]]:
    """Return the holdings that are not empty, by the ranks that share them."""
    groups: dict[tuple[int, ...], list[Holding]] = defaultdict(list)
    for holding in holdings:
        if holding.image.total_bytes:
            groups[holding.replicas].append(holding)
    return groups


def _share(members: list[Holding], *, index: int, count: int) -> list[Piece]:
    starts = [0, *itertools.accumulate(holding.image.total_bytes for holding in members)]
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
    """Return where share `index` begins on the line: rounded down to a page of the file, a row, or a small tensor."""
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
