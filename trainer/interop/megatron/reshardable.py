"""Reads optimizer state in the `dp_reshardable` format: flat buffers' buckets, without names.

For each tensor- and pipeline-parallel rank, and each virtual pipeline chunk, a buffer holds the stage's parameters, in
buckets. The module `buckets` finds the parameters in them. There are two orders: the local modules', and
TransformerEngine's, where norms belong to the linear layers after them. Source: `sharded_param_state_dp_reshardable` in
`megatron/core/optimizer/distrib_optimizer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

import torch

from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.format import Box
from trainer.interop.dcp.folder import DcpFolder
from trainer.interop.megatron.buckets import Bucket, locate
from trainer.interop.megatron.names import MegatronTensor
from trainer.interop.megatron.shards import Pieces, stage_order
from trainer.interop.megatron.state import EMBEDDING, MASTERS, OUTPUT
from trainer.interop.source import MOMENTS
from trainer.interop.stored import FileTensor

_KEY = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(.+\)\.bucket_idx_(\d+)\.param")
_KINDS = {MASTERS: "param", **dict(zip(MOMENTS, MOMENTS, strict=True))}


def _bucket(dcp: DcpFolder, key: str) -> Bucket:
    """Return a bucket whose elements are read when it is sliced."""

    def read(part: slice) -> torch.Tensor:
        return dcp.read_box(key, Box((part.start,), (part.stop - part.start,)))

    return Bucket(dcp.tensors[key].shape[0], dcp.tensors[key].dtype, read)


def bucket_pieces(
    dcp: DcpFolder,
    ranks: Sequence[Sequence[Sequence[str]]],
    tensors: Sequence[MegatronTensor],
    weights: Mapping[str, FileTensor],
) -> Mapping[str, Pieces]:
    """Return master weights and moments by kind, each on its tensor-parallel ranks, whose buffers are laid out alike.

    Args:
        ranks: The result of `bucket_roots`.
        tensors: All the model's tensors, in the local modules' order.
        weights: The model's weights, by `MegatronTensor.numbered`, to compare with.

    Raises:
        CheckpointError: The buckets do not hold the model's parameters in a known order.
        MismatchError: A parameter's place is ambiguous.
        ValueError: The buckets' ranks are unknown.
    """
    table = next(stored for key, stored in dcp.tensors.items() if key.endswith(EMBEDDING))
    tp = len({chunk.offset[0] for chunk in table.chunks})
    if len(ranks) % tp or len({len(chunks) for chunks in ranks}) != 1:
        raise ValueError(f"buckets of {len(ranks)} model-parallel ranks, {tp} of tensor parallelism")
    stages = stage_order(len(ranks) // tp, len(ranks[0]))[::-1]  # as the parameters, from last to first
    roots = [[root for stage, chunk in stages for root in ranks[stage * tp + rank][chunk]] for rank in range(tp)]
    buckets = {kind: [[_bucket(dcp, f"{r}.{name}") for r in rank] for rank in roots] for kind, name in _KINDS.items()}
    parts = {tensor.numbered: _first_part(weights[tensor.numbered], tensor, tp) for tensor in tensors}
    errors = list[TrainerError]()
    for order in (tensors, _fused_order(tensors)):
        ordered = {tensor.numbered: parts[tensor.numbered] for tensor in order}
        if len(ranks) > tp:
            ordered.setdefault(OUTPUT, parts[EMBEDDING])  # a tied embedding's copy is the last stage's last parameter
        try:
            slots = locate(ordered, buckets[MASTERS][0], is_padded=True, where=dcp.path)
            break
        except (CheckpointError, MismatchError) as error:
            errors.append(error)
    else:
        raise errors[0]

    def pieces(name: str, ranks: Sequence[Sequence[Bucket]]) -> list[FileTensor]:
        slot, shape = slots[name], parts[name].shape
        return [FileTensor(shape, r[slot.bucket].dtype, partial(slot.take, r, shape)) for r in ranks]

    return {kind: {name: pieces(name, ranks) for name in parts} for kind, ranks in buckets.items()}


def bucket_roots(dcp: DcpFolder) -> list[list[list[str]]]:
    """Return the buckets' keys without their kind, by model-parallel rank and virtual pipeline chunk. May be empty."""
    roots = {tuple(map(int, match.groups())): key for key in dcp.tensors if (match := _KEY.fullmatch(key))}
    ranks = dict[int, dict[int, list[str]]]()
    for (rank, chunk, _), key in sorted(roots.items()):
        ranks.setdefault(rank, {}).setdefault(chunk, []).append(key.rpartition(".")[0])
    return [list(chunks.values()) for chunks in ranks.values()]


def _first_part(weight: FileTensor, tensor: MegatronTensor, tp: int) -> FileTensor:
    """Return a weight's part on the first tensor-parallel rank."""
    cut = tensor.cut
    if cut is None or tp == 1:
        return weight

    def read() -> torch.Tensor:
        halves = weight.read().chunk(1 + tensor.is_gated, dim=cut)
        return torch.cat([half.chunk(tp, dim=cut)[0] for half in halves], dim=cut)

    return FileTensor(
        tuple(size // tp if dim == cut else size for dim, size in enumerate(weight.shape)), weight.dtype, read
    )


def _fused_order(tensors: Sequence[MegatronTensor]) -> Iterator[MegatronTensor]:
    """Yield the order in TransformerEngine's modules, where a layer's output projection comes before its first norm."""
    for _, layer in groupby(tensors, key=attrgetter("layer")):
        yield from sorted(layer, key=lambda tensor: not tensor.name.startswith("self_attention.linear_proj."))
