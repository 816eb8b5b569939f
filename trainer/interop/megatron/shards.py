"""Joins tensors from Megatron's tensor- and pipeline-parallel ranks into the whole model's.

Sources: `megatron/core/tensor_parallel/layers.py`, `transformer/mlp.py`, and `get_transformer_layer_offset` in
`transformer/transformer_layer.py`. A rank numbers its stage's layers from 0. With virtual stages, stage p of chunk v
comes before stage p + 1, and all stages of chunk v before those of chunk v + 1.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import torch

from trainer.interop.formats import few
from trainer.interop.stored import FileTensor, Shape

_log = logging.getLogger(__name__)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def compare_copies(first: torch.Tensor, second: torch.Tensor, *, what: str, where: object) -> None:
    """Log a warning if a tensor's copies differ. The sign of a zero does not count.

    Megatron's ranks each compute a norm's or bias's gradient themselves, so copies drift apart if kernels add in
    varying order. Like Megatron-Core's own `torch_dist`, an import takes the first copy.
    """
    if not torch.equal(first, second):
        count = int((first != second).count_nonzero())
        most = float((first.double() - second.double()).abs().max())
        _log.warning(
            f"{where}: {count} of {first.numel()} numbers differ on {what}, by at most {most:.2g}; first taken"
        )


# One rank's tensors in a stage, by their names there.
Stage = Mapping[str, FileTensor]
# Each tensor's parts, by tensor-parallel rank, under `MegatronTensor.numbered`.
Pieces = Mapping[str, Sequence[FileTensor]]


def stage_order(stages: int, chunks: int) -> list[tuple[int, int]]:
    """Return pairs of pipeline rank and chunk, in layer order."""
    return [(stage, chunk) for chunk in range(chunks) for stage in range(stages)]


def by_global_name(stages: Sequence[Sequence[Stage]]) -> dict[str, list[FileTensor]]:
    """Return every tensor's pieces, by tensor-parallel rank, with layers numbered through the whole model.

    Args:
        stages: For each stage, in layer order, the tensors on each tensor-parallel rank, under the names in
            Megatron-Core's `GPTModel`, where layers are `decoder.layers.N`.

    Raises:
        ValueError: A stage's ranks hold different tensors, or two stages hold the same tensor.
    """
    pieces, first = dict[str, list[FileTensor]](), 0
    for ranks in stages:
        names = set(ranks[0])
        for rank, tensors in enumerate(ranks):
            if differences := names ^ set(tensors):
                raise ValueError(f"tensor-parallel ranks 0 and {rank} hold different tensors: {few(differences)}")
        layers = {match[1] for name in names if (match := _LAYER.fullmatch(name))}
        for name in ranks[0]:
            match = _LAYER.fullmatch(name)
            full = f"decoder.layers.{first + int(match[1])}.{match[2]}" if match else name
            if full in pieces:
                raise ValueError(f"two stages hold the same tensor: {full}")
            pieces[full] = [rank[name] for rank in ranks]
        first += len(layers)
    return pieces


def joined_shape(pieces: Sequence[FileTensor], cut: int | None) -> Shape:
    """Return a tensor's full shape. See `join`.

    Raises:
        ValueError: The ranks' parts do not fit together.
    """
    shape = list(pieces[0].shape)
    for piece in pieces:
        dims = {dim for dim, (size, first) in enumerate(zip(piece.shape, shape, strict=True)) if size != first}
        if piece.dtype != pieces[0].dtype or dims - {cut}:
            forms = [f"{list(part.shape)} of {part.dtype}" for part in (pieces[0], piece)]
            raise ValueError(f"a tensor's parts on tensor-parallel ranks do not fit together: {' and '.join(forms)}")
    if cut is not None and cut < len(shape):
        shape[cut] = sum(piece.shape[cut] for piece in pieces)
    return tuple(shape)


def join(pieces: Sequence[FileTensor], *, cut: int | None, is_gated: bool, where: object) -> torch.Tensor:
    """Return a full tensor from the tensor-parallel ranks' parts. A single part is returned as a view.

    Args:
        cut: The dimension split by tensor parallelism. None if every rank holds the full tensor.
        is_gated: Whether each part stacks a part of the gate above a part of the up projection.
    """
    if len(pieces) == 1:
        return pieces[0].read()
    if cut is None:
        first = pieces[0].read()
        for rank, piece in enumerate(pieces[1:], start=1):
            compare_copies(first, piece.read(), what=f"tensor-parallel ranks 0 and {rank}", where=where)
        return first
    joined, halves, at = torch.empty(joined_shape(pieces, cut), dtype=pieces[0].dtype), 2 if is_gated else 1, 0
    for piece in pieces:
        width = piece.shape[cut] // halves
        for target, values in zip(joined.chunk(halves, dim=cut), piece.read().chunk(halves, dim=cut), strict=True):
            target.narrow(cut, at, width).copy_(values)
        at += width
        del values  # free the part before the next is read
    return joined
