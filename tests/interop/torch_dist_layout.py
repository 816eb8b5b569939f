"""Writes a state as megatron-core's `torch_dist` lays it out over ranks, without megatron-core.

The values of a rank are those of `megatron_layout`. Sources: `megatron/core/dist_checkpointing` and
`sharded_param_state_*` of `megatron/core/optimizer/distrib_optimizer.py`; for flattened tensors,
`mcore_to_pyt_state_dict` of release 0.12, which splits a tensor into a grid and flattens each part.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.interop.megatron_layout import KEYS, Way, _args, _buckets, _chunk, _groups, _wholes
from trainer.interop.source import StateSource

SETTINGS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


@dataclass(frozen=True)
class Form:
    """How a checkpoint is stored.

    Args:
        kind: `fully` and `buckets` are the forms of the distributed optimizer, `flat` its older one, `plain` the other
            optimizer; `weights` has none.
        prefix: of the names of the model.
        is_stacked: whether the layers are dimension 0 of one tensor.
        is_hybrid: whether the names are those of a `HybridModel`, in which attention and MLP are numbered one by one.
        has_file: whether what is not sharded is in `common.pt`; since release 0.19 it is an object of the DCP folder.
    """

    kind: str = "fully"
    prefix: str = ""
    is_stacked: bool = True
    is_hybrid: bool = False
    has_file: bool = True


class _Chunks(dcp.DefaultSavePlanner):
    """Writes given chunks of tensors, and values that are not tensors."""

    def __init__(self, chunks: dict[str, tuple[tuple[int, ...], dict[tuple[int, ...], Tensor]]], values: Any) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks, self._values = chunks, values

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._values]
        for key, (shape, parts) in self._chunks.items():
            for offset, part in parts.items():
                chunk = ChunkStorageMetadata(torch.Size(offset), part.shape)
                data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(shape))
                index = MetadataIndex(key, torch.Size(offset))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, plans: list[SavePlan]) -> Any:
        found, metadata = super().create_global_plan(plans)
        metadata.all_local_plans = plans  # as megatron-core does
        return found, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.offset is None:
            return self._values[index.fqn]
        return self._chunks[index.fqn][1][tuple(index.offset)]


def write(folder: Path, source: StateSource, way: Way, form: Form, **others: Any) -> Path:
    """Write `folder/iter_<iteration>` and the file that names it; return the former."""
    path = folder / f"iter_{source.iteration:07d}"
    path.mkdir(parents=True)
    wholes = _wholes(source, way)
    chunks: dict[str, Any] = {}
    values: dict[str, Any] = {"rng_state/shard_0.0_1.1": [{"cuda": [1]}]}
    for root, key, dtype in _kinds(form, way):
        for one, tensors in wholes.values():
            is_output = one.tensor.name == "output_layer.weight"
            if not (is_output and source.model.tie_word_embeddings):
                _add(chunks, root, one.tensor, tensors[key].to(dtype), source.model.n_layer, way, form)
    common = {
        "args": _args(source, way, others),
        "checkpoint_version": 3.0,
        "iteration": source.iteration,
        "opt_param_scheduler": {"max_lr": 0.1, "min_lr": 0.0, "num_steps": 12, "lr_decay_style": "cosine"},
        "content_metadata": {"singleton_local_shards": False},
    }
    if form.kind == "buckets":
        chunks |= dict(_bucket_chunks(wholes, source, way))
        for group in range(way.tp * way.pp):
            name = f"optimizer.distributed.dp_group_idx_{group}.optimizer/shard_0_1"
            values[name] = [_groups(source)["optimizer"]]
        common["optimizer"] = {"param_state_sharding_type": "dp_reshardable"}
    elif form.kind == "plain":
        common["optimizer"] = {"param_groups": [SETTINGS], "state": {"common_step": torch.tensor(source.iteration)}}
    elif form.kind != "weights":
        common["optimizer"] = _groups(source)
    if form.has_file:
        torch.save(common, path / "common.pt")
    else:
        values["common_state/shard_0_1"] = [common]
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(backend))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({}, checkpoint_id=path, planner=_Chunks(chunks, values), no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(source.iteration))
    return path


def _kinds(form: Form, way: Way) -> list[tuple[str, str, torch.dtype]]:
    """Return the stored kinds of a named tensor: a prefix, the key of the value, and the dtype."""
    found = [("", "param", way.dtype)]
    if form.kind in ("weights", "buckets"):
        return found
    master = {"fully": "param", "flat": "fp32_param", "plain": "fp32_param"}[form.kind]
    if form.kind != "plain" or way.dtype is not torch.float32:
        found.append((f"optimizer.state.{master}.", "param", torch.float32))
    return found + [(f"optimizer.state.{key}.", key, torch.float32) for key in KEYS[1:]]


def _add(chunks: dict[str, Any], root: str, tensor: Any, value: Tensor, layers: int, way: Way, form: Form) -> None:
    """Add the chunks of one layer of a tensor, or of a tensor outside the layers."""
    is_layer = tensor.layer is not None and form.is_stacked and not form.is_hybrid
    name = tensor.stacked if is_layer else tensor.numbered
    key = root + form.prefix + (_of_hybrid(name) if form.is_hybrid else name)
    first, front = ((tensor.layer,), (layers,)) if is_layer else ((), ())
    counts = [1] * value.dim()
    if tensor.cut is not None:
        counts[tensor.cut] = way.tp * (2 if tensor.is_gated else 1)
    sizes = [size // count for size, count in zip(value.shape, counts, strict=True)]
    is_flat = root and form.kind == "flat" and (value.dim() > 1 or is_layer)
    shape = (*front, *counts, prod(sizes)) if is_flat else (*front, *value.shape)
    _, parts = chunks.setdefault(key, (shape, {}))
    for place in _grid(counts):
        begin = [at * size for at, size in zip(place, sizes, strict=True)]
        part = value[tuple(slice(at, at + size) for at, size in zip(begin, sizes, strict=True))].contiguous()
        one = (1,) * len(front)
        if not is_flat:
            parts[(*first, *begin)] = part.reshape(*one, *part.shape)
            continue
        flat, at = part.reshape(-1), 0
        for share in flat.tensor_split(way.dp):
            if share.numel():
                parts[(*first, *place, at)] = share.reshape(*one, *(1 for _ in place), -1)
            at += share.numel()


def _of_hybrid(name: str) -> str:
    words = name.replace("decoder.final_layernorm.", "decoder.final_norm.").split(".")
    if words[1] == "layers":
        words[2] = str(2 * int(words[2]) + ["self_attention", "mlp"].index(words[3]))
    return ".".join(words)


def _grid(counts: list[int]) -> Iterator[tuple[int, ...]]:
    return iter(
        tuple(int(i) for i in index)
        for index in torch.cartesian_prod(*map(torch.arange, counts)).reshape(-1, len(counts))
    )


def _bucket_chunks(wholes: Any, source: StateSource, way: Way) -> Iterator[tuple[str, Any]]:
    """Yield buckets, with a chunk for each piece of a parameter, or of a gap, on each rank of data parallelism."""
    dtype = f"dtype_({way.dtype}, torch.float32)"
    for group in range(way.tp * way.pp):
        pp, tp = divmod(group, way.tp)
        for vpp in range(way.vpp):
            chunk = _chunk(wholes, source.model, way, tp, pp, vpp)
            for key in KEYS:
                for number, (bucket, size, ends) in enumerate(
                    zip(*_buckets(chunk, key, source.model, way), strict=True)
                ):
                    share = bucket.numel() // way.dp
                    assert bucket.numel() % lcm(way.dp, 128) == 0
                    borders = sorted({0, *range(share, size, share), *ends})
                    assert borders[-1] == size
                    parts = {(at,): bucket[at:end] for at, end in itertools.pairwise(borders)}
                    root = f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{vpp}.{dtype}.bucket_idx_{number}"
                    yield f"{root}.{key}", ((size,), parts)
