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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from reprise.errors import CheckpointError, MismatchError
from trainer.interop.dcp.folder import DcpFolder
from trainer.interop.megatron.buckets import Slot
from trainer.interop.megatron.names import MegatronTensor, Shape
from trainer.interop.megatron.shards import RankCopies, RankPiece, join, stage_order
from trainer.interop.megatron.state import rounding_to

_KEY = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>\(.+\))"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)"
)
_MASTERS = "param"
_ALIGNMENTS = (64, 1)  # elements; older versions do not align
_TABLE, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def is_bucket(key: str) -> bool:
    """Return whether a key names a bucket."""
    return _KEY.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer's buckets in order: each key without the kind, and each element count."""

    keys: tuple[str, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Buckets:
    """The places of all parameters in a folder's buckets.

    Args:
        places: By `MegatronTensor.numbered`, each parameter's buffer on each tensor-parallel rank, and its place there,
            which is the same on all of them.
    """

    dcp: DcpFolder
    copies: RankCopies
    places: Mapping[str, tuple[Sequence[_Buffer], Slot]]

    @classmethod
    def open(
        cls,
        dcp: DcpFolder,
        weights: Callable[[MegatronTensor], torch.Tensor],
        tensors: Sequence[MegatronTensor],
        copies: RankCopies,
    ) -> Buckets:
        """Find every parameter.

        Args:
            weights: Returns a model weight, to compare with.
            tensors: All the model's tensors, in the local modules' order.

        Raises:
            MismatchError: The buckets do not hold the model's parameters in a known order.
        """
        table = next(key for key in dcp.tensors if key.endswith(_TABLE))
        tp = dcp.fragments(table)[0]
        buffers = _buffers(dcp)
        if len(buffers) % tp or len({len(group) for group in buffers}) != 1:
            raise _unknown_layout(dcp, f"{len(buffers)} model-parallel ranks, {tp} of tensor parallelism")
        stages = len(buffers) // tp
        tried = list[str]()
        for order in (_local_order, _fused_order):
            for alignment in _ALIGNMENTS:
                places = _places(buffers, order(tensors), tp=tp, stages=stages, alignment=alignment)
                if places is None:
                    continue
                buckets = cls(dcp, copies, places)
                problem = next(filter(None, (buckets._problem(t, weights) for t in _samples(tensors))), None)
                if problem is None:
                    return buckets
                tried.append(f"{order.__name__.strip('_')}: {problem}")
        raise _unknown_layout(dcp, "; ".join(dict.fromkeys(tried)) or "bucket sizes that fit no division of the layers")

    def read(self, kind: str, tensor: MegatronTensor) -> torch.Tensor:
        """Return a full tensor for a kind, joined over tensor-parallel ranks.

        Raises:
            CheckpointError: The ranks' copies differ, and `copies` refuses them.
        """
        return self._joined(kind, tensor, self.copies)

    def _joined(self, kind: str, tensor: MegatronTensor, copies: RankCopies) -> torch.Tensor:
        buffers, slot = self.places[tensor.numbered]
        shape = _shard(tensor, len(buffers))
        pieces = [RankPiece(shape, lambda b=buffer: self._read(b, slot, kind, shape)) for buffer in buffers]  # type: ignore[misc]
        where = f"{self.dcp.path}, {kind} of {tensor.numbered}"
        return join(pieces, cut=tensor.cut, is_gated=tensor.is_gated, copies=copies, where=where)

    def _read(self, buffer: _Buffer, slot: Slot, kind: str, shape: Shape) -> torch.Tensor:
        return self.dcp.read_box(f"{buffer.keys[slot.bucket]}.{kind}", (slot.offset,), (prod(shape),)).view(shape)

    def _problem(self, tensor: MegatronTensor, weights: Callable[[MegatronTensor], torch.Tensor]) -> str | None:
        """Return a problem if a parameter's master weights do not round to the model's own."""
        try:
            masters = partial(self._joined, _MASTERS, tensor, RankCopies(self.copies.takes_first, is_silent=True))
            master = rounding_to(partial(weights, tensor), masters)
        except CheckpointError:  # a wrong offset also raises this
            return f"copies that differ at {tensor.numbered}"
        return f"other values at {tensor.numbered}" if master is None else None


def _buffers(dcp: DcpFolder) -> list[list[_Buffer]]:
    """Return each model-parallel rank's buffers, by virtual pipeline chunk."""
    buckets_of_buffer = dict[tuple[int, int], dict[int, tuple[str, int]]]()
    for key, stored in dcp.tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match["kind"] != _MASTERS:
            continue
        root = key.removesuffix(f".{_MASTERS}")
        lacking = [kind for kind in ("exp_avg", "exp_avg_sq") if f"{root}.{kind}" not in dcp.tensors]
        if lacking or len(stored.shape) != 1:
            raise _unknown_layout(dcp, f"{root} without {' and '.join(lacking) or 'a flat shape'}")
        buckets_of_buffer.setdefault((int(match["group"]), int(match["buffer"])), {})[int(match["bucket"])] = (
            root,
            stored.shape[0],
        )
    groups = list[list[_Buffer]]()
    for (group, buffer), buckets in sorted(buckets_of_buffer.items()):
        if group == len(groups):
            groups.append([])
        if group != len(groups) - 1 or buffer != len(groups[-1]) or sorted(buckets) != list(range(len(buckets))):
            raise _unknown_layout(dcp, f"gaps in the numbers of buckets, at group {group}, buffer {buffer}")
        keys, counts = zip(*(buckets[number] for number in sorted(buckets)), strict=True)
        groups[-1].append(_Buffer(keys, counts))
    return groups


def _local_order(tensors: Sequence[MegatronTensor]) -> list[MegatronTensor]:
    return list(tensors)


def _fused_order(tensors: Sequence[MegatronTensor]) -> list[MegatronTensor]:
    """Return the order in TransformerEngine's modules, where a layer's first norm follows the output projection."""
    ordered = list[MegatronTensor]()
    norms = list[MegatronTensor]()
    for tensor in tensors:
        if tensor.name.startswith("self_attention.linear_qkv.layer_norm_"):
            norms.append(tensor)
            continue
        if norms and tensor.name == "self_attention.linear_qkv.weight":
            ordered += norms
            norms = []
        ordered.append(tensor)
    return ordered


def _places(
    buffers: Sequence[Sequence[_Buffer]],
    tensors: Sequence[MegatronTensor],
    *,
    tp: int,
    stages: int,
    alignment: int,
) -> dict[str, tuple[Sequence[_Buffer], Slot]] | None:
    """Return every parameter's place, or None if the bucket sizes do not fit this order."""
    first, places = 0, dict[str, tuple[Sequence[_Buffer], Slot]]()
    n_layer = 1 + max(tensor.layer or 0 for tensor in tensors)
    order = stage_order(stages, len(buffers[0]))
    for number, (stage, chunk) in enumerate(order):
        ranks = [buffers[stage * tp + rank][chunk] for rank in range(tp)]
        if len({rank.counts for rank in ranks}) != 1:
            return None
        ends = number == 0, number == len(order) - 1
        for layers in range(n_layer - first, -1, -1) if not ends[1] else [n_layer - first]:
            members = _stage(tensors, range(first, first + layers), ends, is_cut=stages > 1)
            slots = _slots([prod(_shard(tensor, tp)) for tensor in members], ranks[0].counts, alignment)
            if slots is not None:
                break
        else:
            return None
        for tensor, slot in zip(reversed(members), slots, strict=True):
            places.setdefault(tensor.numbered, (ranks, slot))
        first += layers
    return places


def _stage(
    tensors: Sequence[MegatronTensor], layers: range, ends: tuple[bool, bool], *, is_cut: bool
) -> list[MegatronTensor]:
    """Return a stage's parameters. With several stages, the last has a copy of a tied embedding as its output layer."""
    members = list[MegatronTensor]()
    for tensor in tensors:
        if tensor.layer is not None:
            is_here = tensor.layer in layers
        else:
            is_here = ends[0] if tensor.name.startswith("embedding.") else ends[1]
        if is_here:
            members.append(tensor)
    if is_cut and ends[1] and not any(tensor.name == _OUTPUT for tensor in tensors):
        members.append(next(tensor for tensor in tensors if tensor.name == _TABLE))
    return members


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


def _samples(tensors: Sequence[MegatronTensor]) -> Iterator[MegatronTensor]:
    """Yield parameters to compare before writing: the first and last layer, and those outside the layers."""
    last = max(tensor.layer or 0 for tensor in tensors)
    return (tensor for tensor in tensors if tensor.layer in (0, last, None))


def _unknown_layout(dcp: DcpFolder, content: str) -> MismatchError:
    return MismatchError(
        "The Megatron optimizer's buckets do not hold the model's parameters in a known order",
        where=dcp.path,
        expected="master weights that round to the model's own, in the order of the local or of TransformerEngine's "
        "modules",
        found=content,
        fix="Save it with --dist-ckpt-optim-fully-reshardable, or import the weights alone with --weights-only. If the "
        "tensor-parallel ranks diverged, --from-rank0 takes the first copies.",
    )
