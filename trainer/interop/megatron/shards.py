"""Joins tensors from Megatron's tensor- and pipeline-parallel ranks into the whole model's.

Sources: `megatron/core/tensor_parallel/layers.py`, `transformer/mlp.py`, and `get_transformer_layer_offset` in
`transformer/transformer_layer.py`. A rank numbers its stage's layers from 0. With virtual stages, stage p of chunk v
comes before stage p + 1, and all stages of chunk v before those of chunk v + 1.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from reprise.errors import CheckpointError
from trainer.interop.formats import few
from trainer.interop.stored import FileTensor, Shape

_log = logging.getLogger(__name__)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(slots=True)
class RankCopies:
    """Compares a tensor's copies on several ranks. The sign of a zero does not count.

    Megatron's ranks each compute a norm's or bias's gradient themselves, so copies drift apart if kernels add in
    varying order. Megatron-Core's own `torch_dist` stores the first copy without comparing.

    Args:
        takes_first: Whether to take the first copy and log the difference if others differ. Otherwise they are
            refused.
    """

    takes_first: bool = False
    _named: set[str] = field(default_factory=set)

    def compare(self, first: torch.Tensor, second: torch.Tensor, *, what: str, where: object) -> None:
        """Compare two copies.

        Raises:
            CheckpointError: The numbers differ and `takes_first` is not set, or the shapes or dtypes differ.
        """
        has_one_form = first.shape == second.shape and first.dtype == second.dtype
        if not has_one_form:
            difference = f"{list(first.shape)} of {first.dtype}, {list(second.shape)} of {second.dtype}"
        elif torch.equal(first, second) or torch.equal(first.nan_to_num(), second.nan_to_num()):
            return
        else:
            difference = f"{int((first != second).count_nonzero())} of {first.numel()} numbers differ"
        if not has_one_form or not self.takes_first:
            raise CheckpointError(
                f"A tensor's copies on {what} differ",
                where=where,
                expected="the same bits on each",
                found=difference,
                fix="The ranks of that run diverged, or the files come from different saves. --from-rank0 takes "
                "the first copy, as Megatron-Core's torch_dist does.",
            )
        if str(where) not in self._named:  # a tensor may be read several times
            self._named.add(str(where))
            most = float((first.double() - second.double()).abs().max())
            _log.warning(f"{where}: {difference} on {what}, by at most {most:.2g}: the first copy is taken")


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


def layers_of(names: Iterable[str]) -> int:
    """Count the layers among tensor names."""
    return len({match[1] for name in names if (match := _LAYER.fullmatch(name))})


def joined_shape(pieces: Sequence[FileTensor], cut: int | None) -> Shape:
    """Return a tensor's full shape. See `join`."""
    shape = list(pieces[0].shape)
    if cut is not None and cut < len(shape):
        shape[cut] = sum(piece.shape[cut] for piece in pieces)
    return tuple(shape)


def join(
    pieces: Sequence[FileTensor], *, cut: int | None, is_gated: bool, copies: RankCopies, where: object
) -> torch.Tensor:
    """Return a full tensor from the tensor-parallel ranks' parts. A single part is returned as a view.

    Args:
        cut: The dimension split by tensor parallelism. None if every rank holds the full tensor.
        is_gated: Whether each part stacks a part of the gate above a part of the up projection.
        copies: Compares the ranks' copies of a full tensor.

    Raises:
        CheckpointError: Copies differ, and `copies` refuses them; or parts do not fit together.
    """
    if len(pieces) == 1:
        return pieces[0].read()
    if cut is None:
        first = pieces[0].read()
        for rank, piece in enumerate(pieces[1:], start=1):
            copies.compare(first, piece.read(), what=f"tensor-parallel ranks 0 and {rank}", where=where)
        return first
    return _concatenated(pieces, cut, 2 if is_gated else 1, where=where)


def _concatenated(pieces: Sequence[FileTensor], cut: int, halves: int, *, where: object) -> torch.Tensor:
    """Return the parts' first halves, then their second halves. Only a single part is in memory beside the result."""
    shape, at = joined_shape(pieces, cut), 0
    joined = torch.empty(shape, dtype=pieces[0].dtype)
    for rank, piece in enumerate(pieces):
        for half, values in enumerate(piece.read().chunk(halves, dim=cut)):
            target = joined.narrow(cut, half * (shape[cut] // halves) + at, values.shape[cut])
            if (target.shape, target.dtype) != (values.shape, values.dtype):
                raise CheckpointError(
                    "A tensor's parts on the tensor-parallel ranks do not fit together",
                    where=where,
                    expected=f"{list(target.shape)} of {target.dtype}, as on rank 0",
                    found=f"{list(values.shape)} of {values.dtype} on rank {rank}",
                    fix="The files come from different saves.",
                )
            target.copy_(values)
        at += values.shape[cut]
        del values  # free the part before reading the next
    return joined
