"""Reads `torch_dist`, the DCP folders written by megatron-core's `dist_checkpointing`.

The unsharded state is an object in the folder or, before release 0.19, a file `common.pt`. Tensors in the folder are
already joined over tensor- and pipeline-parallel ranks. Optimizer state is stored under parameter names, as full
tensors or, in older versions, as flattened tensors. Alternatively it is in unnamed buckets (`reshardable`). Sources:
`megatron/core/dist_checkpointing` and `optimizer/distrib_optimizer.py`, releases 0.16 and 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.format import Box
from reprise.storage import is_file, json_file
from trainer.interop.dcp.folder import DcpFolder, open_folder
from trainer.interop.formats import ImportOptions, few, parameter_groups, steps_of
from trainer.interop.megatron.names import LAYERS, MegatronTensor
from trainer.interop.megatron.reshardable import bucket_pieces, bucket_roots
from trainer.interop.megatron.shards import Pieces
from trainer.interop.megatron.state import (
    EMBEDDING,
    MASTERS,
    Groups,
    Joined,
    MegatronCheckpoint,
    SavedOptimizer,
)
from trainer.interop.source import MOMENTS
from trainer.interop.stored import FileTensor, Shape
from trainer.interop.torch_file import attributes_of, read_torch_file

METADATA, COMMON, BACKEND, TORCH_DIST = "metadata.json", "common.pt", "sharded_backend", "torch_dist"
_COMMON_OBJECT = "common_state/shard_0_1"
_STACKED = re.compile(rf"{re.escape(LAYERS)}\.(?!\d)(.+)")
_STATE = "optimizer.state."
_COPIES = ("param", "fp32_param")  # in fully_reshardable; in the other optimizers


def read_torch_dist(folder: Path, options: ImportOptions) -> MegatronCheckpoint:
    """Open an `iter_` folder.

    Raises:
        CheckpointError: Files are missing or damaged, or pickles are not trusted.
        MismatchError: The folder was saved in an unsupported way, or holds no model or several.
    """
    backend = json_file.read(folder / METADATA).get(BACKEND)
    if backend != TORCH_DIST:
        raise MismatchError(
            "A Megatron checkpoint has an unsupported form",
            where=folder / METADATA,
            expected=f"{BACKEND} {TORCH_DIST}",
            found=backend,
            fix=f"Save it with --ckpt-format {TORCH_DIST}.",
        )
    dcp = open_folder(folder, options)
    common, keys = _common(dcp), [key for key in dcp.tensors if not _is_optimizers(key)]
    prefixes = [key.removesuffix(EMBEDDING) for key in keys if key.endswith(EMBEDDING)]
    if len(prefixes) != 1:
        raise MismatchError(
            "A Megatron checkpoint holds several models" if prefixes else "A Megatron checkpoint holds no GPT model",
            where=folder,
            expected=f"one tensor {EMBEDDING}, with any prefix",
            found=few(prefixes or keys),
        )
    weights = _pieces(dcp, keys, prefixes[0])
    optimizer = partial(_optimizer, dcp, prefixes[0], common)
    return MegatronCheckpoint(folder, common, attributes_of(common.get("args")), weights, 1, optimizer)


def _common(dcp: DcpFolder) -> Any:
    """Return the unsharded state: the iteration, the arguments and the optimizer's settings."""
    if is_file(dcp.path / COMMON):
        return read_torch_file(dcp.path / COMMON)
    if _COMMON_OBJECT not in dcp.values:
        raise CheckpointError(
            "A Megatron checkpoint has no iteration and no arguments",
            where=dcp.path,
            expected=f"the object {_COMMON_OBJECT}, or a file {COMMON} from Megatron-Core before 0.19",
            fix=f"If that folder was copied, copy {COMMON} too; otherwise use another checkpoint.",
        )
    (state,) = dcp.read_value(_COMMON_OBJECT)
    return dict(state)


def _pieces(dcp: DcpFolder, keys: Iterable[str], root: str, weights: Joined | None = None) -> Pieces:
    """Return tensors under numbered names. A tensor that stacks layers is one for each.

    Args:
        root: The prefix that the names lack.
        weights: The model's weights, with the shapes of flattened tensors. Without them, none is flattened.
    """
    pieces = dict[str, list[FileTensor]]()
    for key in keys:
        name, shape = key.removeprefix(root), dcp.tensors[key].shape
        match = _STACKED.fullmatch(name)
        for layer in range(shape[0]) if match else (None,):
            numbered = f"{LAYERS}.{layer}.{match[1]}" if match else name
            first = () if layer is None else (layer,)
            weight = (weights or {}).get(numbered)
            pieces[numbered] = [_tensor(dcp, key, first, shape[len(first) :] if weight is None else weight.shape)]
    return pieces


def _tensor(dcp: DcpFolder, key: str, first: Shape, shape: Shape) -> FileTensor:
    """Return a tensor, or its layer `first`. It may be a regular grid of parts, each flattened.

    A flattened tensor is [parts in dimension 0, parts in dimension 1, ..., elements per part].
    """
    stored = dcp.tensors[key]
    inner, grid = stored.shape[len(first) :], stored.shape[len(first) : -1]
    is_flat = len(grid) == len(shape) and prod(inner) == prod(shape)
    is_flat &= all(count and size % count == 0 for size, count in zip(shape, grid, strict=False))

    def read() -> torch.Tensor:
        box = Box((*first, *(0 for _ in inner)), (*(1 for _ in first), *inner))
        values = dcp.read_box(key, box).reshape(inner)
        if not is_flat:
            return values
        order = [axis for dim in range(len(shape)) for axis in (dim, len(shape) + dim)]
        part = [size // count for size, count in zip(shape, grid, strict=True)]
        return values.reshape(*grid, *part).permute(order).reshape(shape)

    return FileTensor(shape if is_flat else inner, stored.dtype, read)


def _is_optimizers(key: str) -> bool:
    return key.startswith(("optimizer.", "chained_"))


def _optimizer(
    dcp: DcpFolder,
    prefix: str,
    common: Mapping[str, Any],
    tensors: Sequence[MegatronTensor],
    weights: Joined,
) -> SavedOptimizer | None:
    """Return the optimizer's content, by name or from buckets."""
    groups: Groups = parameter_groups(common.get("optimizer"))
    if any(key.startswith(f"{_STATE}{MOMENTS[0]}.") for key in dcp.tensors):
        by_kind = dict[str, Pieces]()
        for name in (*MOMENTS, *_COPIES):
            root = f"{_STATE}{name}.{prefix}"
            keys = [key for key in dcp.tensors if key.startswith(root)]
            if keys or name in MOMENTS:
                by_kind[MASTERS if name in _COPIES else name] = _pieces(dcp, keys, root, weights)
        pieces: Mapping[str, Pieces] = by_kind
    elif ranks := bucket_roots(dcp):
        groups, pieces = _saved_groups(dcp), bucket_pieces(dcp, ranks, tensors, weights)
    elif keys := sorted(key for key in (*dcp.tensors, *dcp.values) if _is_optimizers(key)):
        raise MismatchError(
            "A Megatron checkpoint holds optimizer state in an unsupported form",
            where=dcp.path,
            expected="exp_avg and exp_avg_sq for every parameter by name, or buckets of dp_reshardable",
            found=f"{count_of(len(keys), 'key')}: {few(keys)}",
            fix="Save it with --dist-ckpt-optim-fully-reshardable and one Adam for all parameters, or import the "
            "weights alone with --weights-only.",
        )
    else:
        return None
    return SavedOptimizer(
        pieces, groups, [*(group.get("step") for group in groups), *steps_of(common.get("optimizer"))]
    )


def _saved_groups(dcp: DcpFolder) -> Groups:
    """Return the parameter groups from optimizer settings stored per model-parallel rank."""
    groups = list[Mapping[str, Any]]()
    for key in sorted(dcp.values):
        if re.fullmatch(r"optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_0_1", key):
            value = dcp.read_value(key)
            for table in value if isinstance(value, list) else [value]:
                groups += parameter_groups(table)
    return groups
