"""Reads optimizer state in the `dp_reshardable` format: flat buffers' buckets, without names.

For each tensor- and pipeline-parallel rank, and each virtual pipeline chunk, a buffer holds the stage's parameters, in
buckets. They lie in reverse `model.parameters()` order, each starting at a multiple of 64 elements. The bucket sizes
are known, so the offsets follow from the parameter order. There are two orders: the local modules', and
TransformerEngine's, where norms belong to the linear layers after them. In the right order the master weights round to
the model's own. Samples are compared at the start, other parameters when they are read. Source:
`sharded_param_state_dp_reshardable` in `megatron/core/optimizer/distrib_optimizer.py`, and
`megatron/core/distributed/param_and_grad_buffer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from math import prod

import torch

from reprise.errors import MismatchError
from reprise.format import Box
from trainer.interop.dcp.folder import DcpFolder
from trainer.interop.megatron.buckets import Slot
from trainer.interop.megatron.names import MegatronTensor
from trainer.interop.megatron.shards import Pieces, RankCopies, join, stage_order
from trainer.interop.megatron.state import EMBEDDING, MASTERS, OUTPUT, rounding_to
from trainer.interop.source import MOMENTS
from trainer.interop.stored import FileTensor, Shape

_KEY = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(.+\)\.bucket_idx_(\d+)\.param")
_KINDS = {MASTERS: "param", **dict(zip(MOMENTS, MOMENTS, strict=True))}
_ALIGNMENTS = (64, 1)  # elements; older versions do not align


# A buffer's buckets in order: each element count, by the key without the kind.
_Buffer = Mapping[str, int]


def has_buckets(dcp: DcpFolder) -> bool:
    """Return whether a folder contains buckets."""
    return any(map(_KEY.fullmatch, dcp.tensors))


def bucket_pieces(
    dcp: DcpFolder, tensors: Sequence[MegatronTensor], weights: Mapping[str, FileTensor]
) -> Mapping[str, Pieces]:
    """Return master weights and moments by kind, each on its tensor-parallel ranks.

    Args:
        tensors: All the model's tensors, in the local modules' order.
        weights: The model's weights, by `MegatronTensor.numbered`, to compare with.

    Raises:
        MismatchError: The buckets do not hold the model's parameters in a known order.
    """
    table = next(stored for key, stored in dcp.tensors.items() if key.endswith(EMBEDDING))
    tp, buffers = len({chunk.offset[0] for chunk in table.chunks}), _buffers(dcp)
    if len(buffers) % tp or len({len(group) for group in buffers}) != 1:
        raise _unknown_layout(dcp, f"{len(buffers)} model-parallel ranks, {tp} of tensor parallelism")
    tried = list[str]()
    for order, alignment in product((tensors, _fused_order(tensors)), _ALIGNMENTS):
        places = _places(buffers, order, tp=tp, alignment=alignment)
        if places is None:
            continue
        pieces = {
            kind: {t.numbered: _pieces(dcp, name, *places[t.numbered], _shard(t, tp)) for t in tensors}
            for kind, name in _KINDS.items()
        }
        strange = next((t for t in _samples(tensors) if not _has_weights(t, weights, pieces[MASTERS])), None)
        if strange is None:
            return pieces
        tried.append(f"other values at {strange.numbered}")
    raise _unknown_layout(dcp, "; ".join(dict.fromkeys(tried)) or "bucket sizes that fit no division of the layers")


def _pieces(dcp: DcpFolder, name: str, buffers: Sequence[_Buffer], slot: Slot, shape: Shape) -> list[FileTensor]:
    """Return a parameter's part in each rank's buffer."""

    def read(key: str) -> torch.Tensor:
        return dcp.read_box(key, Box((slot.offset,), (prod(shape),))).view(shape)

    keys = [f"{list(buffer)[slot.bucket]}.{name}" for buffer in buffers]
    return [FileTensor(shape, dcp.tensors[key].dtype, partial(read, key)) for key in keys]


def _has_weights(tensor: MegatronTensor, weights: Mapping[str, FileTensor], masters: Pieces) -> bool:
    """Return whether a parameter's master weights round to the model's own. Copies are compared when they are read."""
    pieces = masters[tensor.numbered]
    pieces = pieces[:1] if tensor.cut is None else pieces
    read = partial(join, pieces, cut=tensor.cut, is_gated=tensor.is_gated, copies=RankCopies(), where=tensor.numbered)
    return rounding_to(weights[tensor.numbered].read, read) is not None


def _buffers(dcp: DcpFolder) -> list[list[_Buffer]]:
    """Return each model-parallel rank's buffers, by virtual pipeline chunk."""
    roots = {
        tuple(map(int, match.groups())): key.rpartition(".")[0] for key in dcp.tensors if (match := _KEY.fullmatch(key))
    }
    ranks = dict[int, dict[int, dict[str, int]]]()
    for (rank, chunk, _), root in sorted(roots.items()):
        ((count,),) = {dcp.tensors[f"{root}.{name}"].shape for name in _KINDS.values()}  # flat, and the same for each
        ranks.setdefault(rank, {}).setdefault(chunk, {})[root] = count
    return [list(chunks.values()) for chunks in ranks.values()]


def _fused_order(tensors: Sequence[MegatronTensor]) -> list[MegatronTensor]:
    """Return the order in TransformerEngine's modules, where a layer's first norm follows the output projection."""
    ordered, norms = list[MegatronTensor](), list[MegatronTensor]()
    for tensor in tensors:
        if tensor.name.startswith("self_attention.linear_qkv.layer_norm_"):
            norms.append(tensor)
            continue
        if tensor.name == "self_attention.linear_qkv.weight":
            ordered += norms
            norms = []
        ordered.append(tensor)
    return ordered


def _places(
    buffers: Sequence[Sequence[_Buffer]], tensors: Sequence[MegatronTensor], *, tp: int, alignment: int
) -> dict[str, tuple[Sequence[_Buffer], Slot]] | None:
    """Return every parameter's buffer on each tensor-parallel rank, and its place there, the same on all of them.

    A stage holds the parameters that follow the previous stage's. With several stages, the last also has a copy of a
    tied embedding.

    Returns:
        The places by `MegatronTensor.numbered`, or None if the bucket sizes do not fit this order.
    """
    names, counts = [tensor.numbered for tensor in tensors], [prod(_shard(tensor, tp)) for tensor in tensors]
    if len(buffers) > tp and OUTPUT not in names:
        names, counts = [*names, EMBEDDING], [*counts, counts[names.index(EMBEDDING)]]
    begin, places = 0, dict[str, tuple[Sequence[_Buffer], Slot]]()
    for stage, chunk in stage_order(len(buffers) // tp, len(buffers[0])):
        ranks = [buffers[stage * tp + rank][chunk] for rank in range(tp)]
        (sizes, *_), ends = [list(rank.values()) for rank in ranks], range(len(names), begin - 1, -1)
        fitting = ((end, slots) for end in ends if (slots := _slots(counts[begin:end], sizes, alignment)))
        end, slots = next(fitting, (begin, None))
        if slots is None or any(list(rank.values()) != sizes for rank in ranks):
            return None
        for name, slot in zip(reversed(names[begin:end]), slots, strict=True):
            places.setdefault(name, (ranks, slot))
        begin = end
    return places if begin == len(names) else None


def _slots(counts: Sequence[int], buckets: Sequence[int], alignment: int) -> list[Slot] | None:
    """Return the parameters' places, last to first, or None if a bucket ends within a parameter.

    Args:
        counts: Element counts in `model.parameters()` order.
    """
    slots, bucket, at = list[Slot](), 0, 0
    for count in reversed(counts):
        begin = -(-at // alignment) * alignment
        if begin + count > buckets[bucket]:
            if buckets[bucket] not in (at, begin) or bucket + 1 == len(buckets):
                return None
            bucket, begin = bucket + 1, 0
            if count > buckets[bucket]:
                return None
        slots.append(Slot(bucket, begin))
        at = begin + count
    aligned = -(-at // alignment) * alignment
    return slots if bucket == len(buckets) - 1 and buckets[bucket] in (at, aligned) else None


def _shard(tensor: MegatronTensor, tp: int) -> Shape:
    """Return a tensor's shape on a tensor-parallel rank."""
    return tuple(size // tp if dim == tensor.cut else size for dim, size in enumerate(tensor.shape))


def _samples(tensors: Sequence[MegatronTensor]) -> list[MegatronTensor]:
    """Return parameters to compare before writing: the first and last layer, and those outside the layers."""
    last = max(tensor.layer or 0 for tensor in tensors)
    return [tensor for tensor in tensors if tensor.layer in (0, last, None)]


def _unknown_layout(dcp: DcpFolder, content: str) -> MismatchError:
    return MismatchError(
        "The Megatron optimizer's buckets do not hold the model's parameters in a known order",
        where=dcp.path,
        expected="master weights that round to the model's own, in the order of the local or of TransformerEngine's "
        "modules",
        found=content,
        fix="Save it with --dist-ckpt-optim-fully-reshardable, or import the weights alone with --weights-only.",
    )
