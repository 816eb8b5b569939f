"""What a rank writes, from the layout to the chunks: computed again only where the state has moved."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.checkpoint.format.layout import PAGE_BYTES, Layout, TensorSpec, build_layout
from trainer.checkpoint.saving.chunks import Chunk, cut
from trainer.checkpoint.saving.ownership import Holding, Piece, pieces_of, shared_pieces
from trainer.checkpoint.saving.replica_digests import SharedPieces
from trainer.checkpoint.tensors.live import Contents, LiveTensor, storages_of
from trainer.checkpoint.tensors.memory import Sources


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is known of a save before it begins, and is the same for the next one of the same tensors.

    Args:
        chunks: by file, in extents that may be written at once. The files come in an order that is rotated by rank,
            so that ranks do not queue for one.
        columns: the pieces whose rows lie apart in their file.
        shared: the pieces, of any rank, of the boxes that several ranks hold, this one among them.
        watched: the memory of those of them that this rank writes nothing of.
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


def make_plan(contents: Contents, *, rank: int, file_bytes: int, holds_steps: bool) -> Plan:
    """Plan the saves of `contents`.

    Args:
        holds_steps: whether steps of `contents.optimizers` are held back while the save reads what only they change;
            else all memory stays as it is until the save is over.
    """
    layout = build_layout(contents.specs, file_bytes=file_bytes)
    pieces = plan(contents.live, layout, rank)
    shared = shared_pieces(_holdings(contents.live, layout))
    wanted = {piece.name for piece in pieces}
    watched = {name for tensors in shared.values() for name in tensors} - wanted
    steady = storages_of(contents.optimizers) if holds_steps else None
    chunks = _rotated(cut(pieces, layout), rank)
    return Plan(
        specs=contents.specs,
        live=contents.live,
        optimizers=contents.optimizers,
        layout=layout,
        pieces=pieces,
        chunks=chunks,
        columns=columns_of(chunks),
        sources=Sources(_named(contents.live, wanted), steady),
        shared=shared,
        watched=Sources(_named(contents.live, watched), steady),
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
