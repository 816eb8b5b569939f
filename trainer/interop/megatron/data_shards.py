"""Names the state of Megatron-LM's distributed optimizer before May 2023, a part of it on each data-parallel rank.

The parameters of a stage lie end to end in the reverse order of `model.parameters()`, and each of N data-parallel
ranks has an N-th, rounded up, of all numbers: parts of some parameters, flat. Within each of its two groups, with
weight decay and without, a rank numbers its parts in the order of `model.parameters()`, chunk by chunk. Sources:
`build_model_gbuf_param_range_map` and `build_optimizer_group_ranges` of `megatron/optimizer/distrib_optimizer.py`, and
`megatron/model/distributed.py`, both at tag 23.04.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from reprise.errors import CheckpointError
from trainer.interop.megatron.joined import MASTERS
from trainer.interop.megatron.numbered import decays, groups_of
from trainer.interop.megatron.shards import RankPiece, Shape, Stage
from trainer.interop.megatron.state import MOMENTS
from trainer.interop.torch_file import is_plain

Table = Mapping[Any, Any]

_COPIES = "shard_fp32_from_float16_groups"


@dataclass(frozen=True, slots=True)
class _Part:
    """A data-parallel rank's part of a parameter: the name, the chunk, and how many of its numbers."""

    chunk: int
    name: str
    count: int


def state_of_data_ranks(
    tables: Sequence[Table], chunks: Sequence[Stage], *, where: object
) -> list[dict[str, dict[str, RankPiece]]]:
    """Return, for each chunk of a model-parallel rank, its moments and master weights by name.

    Args:
        tables: the entry `optimizer` of each data-parallel rank, in order.
        chunks: the rank's weights, a chunk for each virtual stage.

    Raises:
        CheckpointError: if a rank's entries are not its parts of the parameters.
    """
    state: list[dict[str, dict[str, list[torch.Tensor]]]] = [{} for _ in chunks]
    for rank, table in enumerate(tables):
        where_rank = f"{where}, data-parallel rank {rank}"
        parts = list(_parts(chunks, rank, len(tables)))
        for part, tensors in _entries(table, parts, chunks, where=where_rank):
            for key, tensor in tensors.items():
                state[part.chunk].setdefault(key, {}).setdefault(part.name, []).append(tensor)
    return [
        {
            key: {name: _joined(parts, chunk[name].shape) for name, parts in tensors.items()}
            for key, tensors in of_chunk.items()
        }
        for of_chunk, chunk in zip(state, chunks, strict=True)
    ]


def _parts(chunks: Sequence[Stage], rank: int, ranks: int) -> Iterator[_Part]:
    """Yield a rank's parts in the order of `model.parameters()`, chunk by chunk."""
    for number, chunk in enumerate(chunks):
        end = total = sum(prod(piece.shape) for piece in chunk.values())
        share = -(-total // ranks)
        first, last = rank * share, min(total, (rank + 1) * share)
        for name, piece in chunk.items():
            begin = end - prod(piece.shape)
            count = min(end, last) - max(begin, first)
            if count > 0:
                yield _Part(number, name, count)
            end = begin


def _entries(
    table: Table, parts: Sequence[_Part], chunks: Sequence[Stage], *, where: object
) -> Iterable[tuple[_Part, dict[str, torch.Tensor]]]:
    """Return a rank's parts with their moments and master weights."""
    inner = table["optimizer"]
    groups, state, copies = groups_of(inner, where=where), inner["state"], table[_COPIES]
    numbers = [number for group in groups for number in group["params"]]
    flat = [copy for group in copies for copy in group]
    decayed = [part for part in parts if decays(part.name, chunks[part.chunk][part.name])]
    undecayed = [part for part in parts if not decays(part.name, chunks[part.chunk][part.name])]
    # Both orders of the groups are tried.
    for ordered in ([*decayed, *undecayed], [*undecayed, *decayed]):
        tensors = [{key: state[number].get(key) for key in MOMENTS} for number in numbers]
        if flat and len(flat) == len(tensors):
            tensors = [{**moments, MASTERS: copy} for moments, copy in zip(tensors, flat, strict=True)]
        if len(ordered) == len(tensors) and all(
            is_plain(tensor) and tensor.shape == (part.count,)
            for part, of_part in zip(ordered, tensors, strict=True)
            for tensor in of_part.values()
        ):
            detached = [{key: tensor.detach() for key, tensor in of_part.items()} for of_part in tensors]
            return zip(ordered, detached, strict=True)
    raise CheckpointError(
        "A data-parallel rank's optimizer does not hold its parts of the parameters",
        where=where,
        expected=f"{len(decayed)} parts of matrices, {len(undecayed)} of biases and vectors",
        found=f"groups of {' and '.join(str(len(group['params'])) for group in groups)}, or of other sizes",
        fix="Files of data-parallel ranks are missing or of several saves, or the optimizer is not Adam. Take the "
        "weights alone with --weights-only.",
    )


def _joined(parts: Sequence[torch.Tensor], shape: Shape) -> RankPiece:
    return RankPiece(shape, partial(_cat, parts, shape))


def _cat(parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).view(shape)
