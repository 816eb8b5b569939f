"""Reads `torch_dist`, the DCP folders written by megatron-core's `dist_checkpointing`.

The unsharded state is an object in the folder or, before release 0.19, a file `common.pt`. Tensors in the folder are
already joined over tensor- and pipeline-parallel ranks. Optimizer state is stored under parameter names, as full
tensors or, in older versions, as flattened tensors. Alternatively it is in unnamed buckets (`reshardable`). Sources:
`megatron/core/dist_checkpointing` and `optimizer/distrib_optimizer.py`, releases 0.16 and 0.19.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.storage import integer, is_file, json_file
from trainer.interop.dcp.folder import DcpFolder, open_folder
from trainer.interop.formats import ImportOptions, common_step, listed, require_moments
from trainer.interop.megatron.arguments import DescribedModel, describe
from trainer.interop.megatron.hybrid import stored_name
from trainer.interop.megatron.names import LAYERS, MegatronTensor, Shape
from trainer.interop.megatron.reshardable import Buckets, is_bucket
from trainer.interop.megatron.shards import RankCopies, layers_of
from trainer.interop.megatron.state import (
    MASTERS,
    MOMENTS,
    WEIGHTS,
    MegatronState,
    Readers,
    consumed_samples,
    log_omissions,
    parameter_groups,
    signs_of_moments,
)
from trainer.interop.torch_file import attributes_of, open_torch_file

_log = logging.getLogger(__name__)

METADATA, COMMON, BACKEND, TORCH_DIST = "metadata.json", "common.pt", "sharded_backend", "torch_dist"
_COMMON_OBJECT = "common_state/shard_0_1"
_TABLE = "embedding.word_embeddings.weight"
_STACKED = f"{LAYERS}.self_attention.linear_proj.weight"
_STATE = "optimizer.state."
_COPIES = ("param", "fp32_param")  # in fully_reshardable; in the other optimizers
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def read_torch_dist(folder: Path, options: ImportOptions) -> tuple[MegatronState, DescribedModel]:
    """Open an `iter_` folder.

    Raises:
        CheckpointError: Files are missing or damaged, or pickles are not trusted.
        MismatchError: The folder holds another model, or was saved in an unsupported way.
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
    dcp = open_folder(folder, trust_pickle=options.trusts_pickle)
    common = _common(dcp)
    args = attributes_of(common.get("args"))
    prefix = _prefix(dcp)
    rows, layers = dcp.tensors[prefix + _TABLE].shape[0], _layers(dcp, prefix)
    described = describe(args, rows, layers, options, where=folder, names=dcp.tensors)
    files = _Files(dcp, prefix, _is_stacked(dcp, prefix), described.is_hybrid)
    tensors = [correspondence.tensor for correspondence in described.correspondences()]
    _check_model(files, tensors)
    readers, groups = _optimizer(files, tensors, common, options)
    log_omissions(common, described, args, groups)
    iteration = integer(common.get("iteration"))
    state = MegatronState(
        {WEIGHTS: files.weight, **readers},
        _step(groups, common, iteration, where=folder) if readers else 0.0,
        iteration,
        consumed_samples(common, args),
    )
    return state, described


def _common(dcp: DcpFolder) -> Mapping[str, Any]:
    """Return the unsharded state: the iteration, the arguments and the optimizer's settings."""
    if is_file(dcp.path / COMMON):
        return open_torch_file(dcp.path / COMMON)
    if _COMMON_OBJECT not in dcp.values:
        raise CheckpointError(
            "A Megatron checkpoint has no iteration and no arguments",
            where=dcp.path,
            expected=f"the object {_COMMON_OBJECT}, or a file {COMMON} from Megatron-Core before 0.19",
            found="neither",
            fix=f"If that folder was copied, copy {COMMON} too; otherwise use another checkpoint.",
        )
    state = dcp.read_value(_COMMON_OBJECT, admits_all=True)
    if not (isinstance(state, list) and len(state) == 1 and isinstance(state[0], Mapping)):
        raise CheckpointError(
            "The Megatron checkpoint's unsharded state cannot be read",
            where=f"{dcp.path}, {_COMMON_OBJECT}",
            expected="a list with one dictionary",
            found=type(state).__name__,
        )
    return state[0]


@dataclass(frozen=True, slots=True)
class _Files:
    """A folder's tensors, addressed by Megatron's model tensors.

    Args:
        prefix: Prefix of the model's names, such as `module.`.
        is_stacked: Whether a single tensor stacks all layers.
        is_hybrid: Whether the names are a `HybridModel`'s.
    """

    dcp: DcpFolder
    prefix: str
    is_stacked: bool
    is_hybrid: bool

    def weight(self, tensor: MegatronTensor) -> torch.Tensor:
        return self.read("", tensor)

    def key(self, root: str, tensor: MegatronTensor) -> str:
        name = tensor.stacked if self.is_stacked else tensor.numbered
        return root + self.prefix + (stored_name(name) if self.is_hybrid else name)

    def expected(self, tensor: MegatronTensor, layers: int) -> Shape:
        return (layers, *tensor.shape) if self.is_stacked and tensor.layer is not None else tensor.shape

    def read(self, root: str, tensor: MegatronTensor) -> torch.Tensor:
        """Return a tensor, or its layer from a stacked tensor. Flattened parts are joined."""
        key = self.key(root, tensor)
        is_layer = self.is_stacked and tensor.layer is not None
        stored = self.dcp.tensors[key].shape
        if is_layer:
            assert tensor.layer is not None
            inner = stored[1:]
            values = self.dcp.read_box(key, (tensor.layer, *(0 for _ in inner)), (1, *inner)).reshape(inner)
        else:
            inner, values = stored, self.dcp.read_tensor(key)
        return values if inner == tensor.shape else _unflattened(values, tensor.shape)


def _unflattened(parts: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return a tensor with `shape` from a regular grid of parts, each flattened along the last dimension.

    Args:
        parts: [parts in dimension 0, parts in dimension 1, ..., elements per part].
    """
    grid = parts.shape[:-1]
    inner = [size // count for size, count in zip(shape, grid, strict=True)]
    dims = len(shape)
    order = [axis for dim in range(dims) for axis in (dim, dims + dim)]
    return parts.reshape(*grid, *inner).permute(order).reshape(shape)


def _is_flattened(stored: Shape, shape: Shape) -> bool:
    if len(stored) != len(shape) + 1 or prod(stored) != prod(shape):
        return False
    return all(count and size % count == 0 for size, count in zip(shape, stored, strict=False))


def _prefix(dcp: DcpFolder) -> str:
    """Return the prefix of the model's names."""
    prefixes = sorted(
        key.removesuffix(_TABLE) for key in dcp.tensors if key.endswith(_TABLE) and not _is_optimizers(key)
    )
    if len(prefixes) != 1:
        some = ", ".join(sorted(dcp.tensors)[:5])
        raise MismatchError(
            "A Megatron checkpoint holds several models" if prefixes else "A Megatron checkpoint holds no GPT model",
            where=dcp.path,
            expected=f"one tensor {_TABLE}, with any prefix",
            found=", ".join(f"{prefix}{_TABLE}" for prefix in prefixes)
            or f"{count_of(len(dcp.tensors), 'tensor')}: {some} ...",
        )
    return prefixes[0]


def _is_optimizers(key: str) -> bool:
    return key.startswith(("optimizer.", "chained_"))


def _is_stacked(dcp: DcpFolder, prefix: str) -> bool:
    return f"{prefix}{_STACKED}" in dcp.tensors


def _layers(dcp: DcpFolder, prefix: str) -> int:
    """Count the layers. A stacked tensor without elements has none."""
    stacked = dcp.tensors.get(f"{prefix}{_STACKED}")
    if stacked is not None:
        return min(stacked.shape[0], prod(stacked.shape)) if stacked.shape else 0
    return layers_of(key.removeprefix(prefix) for key in dcp.tensors if key.startswith(prefix))


def _check_model(files: _Files, tensors: Sequence[MegatronTensor]) -> None:
    """Refuse a folder with missing or unexpected tensors, or with another shape or dtype."""
    problems = list(_differences(files, "", tensors))
    expected = {files.key("", tensor) for tensor in tensors}
    problems += [f"not of the model: {key}" for key in files.dcp.tensors.keys() - expected if not _is_optimizers(key)]
    if problems:
        raise MismatchError(
            "The Megatron checkpoint holds a different model",
            where=files.dcp.path,
            found=listed(sorted(problems), "difference"),
            fix="If its arguments do not describe the model, set it with overrides, such as model.n_layer=N or "
            "model.tie_word_embeddings=false.",
        )


def _differences(
    files: _Files, root: str, tensors: Sequence[MegatronTensor], *, is_flat: bool = False
) -> Iterator[str]:
    layers, seen = 1 + max(tensor.layer or 0 for tensor in tensors), set[str]()
    for tensor in tensors:
        key, shape = files.key(root, tensor), files.expected(tensor, layers)
        if key in seen:
            continue
        seen.add(key)
        stored = files.dcp.tensors.get(key)
        if stored is None:
            yield f"missing: {key}"
        elif stored.shape != shape and not (is_flat and _is_flattened(stored.shape, shape)):
            yield f"{key}: shape {list(stored.shape)}, expected {list(shape)}"
        elif stored.dtype not in _FLOATS:
            yield f"{key}: {stored.dtype}"


def _optimizer(
    files: _Files,
    tensors: Sequence[MegatronTensor],
    common: Mapping[str, Any],
    options: ImportOptions,
) -> tuple[Readers, list[Mapping[str, Any]]]:
    """Return readers for master weights and moments, and the parameter groups. Both are empty without an optimizer."""
    dcp = files.dcp
    if options.weights_only:
        if any(map(_is_optimizers, dcp.tensors)):
            _log.warning(
                "not carried over, because of --weights-only: the optimizer's state; the weights are the model's own"
            )
        return {}, []
    if any(key.startswith(f"{_STATE}{MOMENTS[0]}.") for key in dcp.tensors):
        copies = [kind for kind in _COPIES if f"{_STATE}{kind}.{files.prefix}{_TABLE}" in dcp.tensors][:1]
        roots = {key: f"{_STATE}{kind}." for key, kind in zip((*MOMENTS, MASTERS), (*MOMENTS, *copies), strict=False)}
        problems = [problem for root in roots.values() for problem in _differences(files, root, tensors, is_flat=True)]
        if problems:
            raise _partial_optimizer(dcp.path, listed(problems, "difference"))
        return {key: partial(files.read, root) for key, root in roots.items()}, parameter_groups(
            common.get("optimizer")
        )
    if any(is_bucket(key) for key in dcp.tensors):
        buckets = Buckets.open(dcp, files.weight, tensors, RankCopies(options.from_rank0))
        kinds = zip((MASTERS, *MOMENTS), (_COPIES[0], *MOMENTS), strict=True)
        return {key: partial(buckets.read, kind) for key, kind in kinds}, _saved_groups(dcp)
    _refuse_others(dcp)
    require_moments(signs_of_moments(common, dcp.path), options, where=dcp.path)
    _log.warning("The checkpoint has no optimizer state: only the weights are imported, as iteration 0")
    return {}, []


def _saved_groups(dcp: DcpFolder) -> list[Mapping[str, Any]]:
    """Return the parameter groups from optimizer settings stored per model-parallel rank."""
    groups = list[Mapping[str, Any]]()
    for key in sorted(dcp.values):
        if re.fullmatch(r"optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_0_1", key):
            value = dcp.read_value(key)
            for table in value if isinstance(value, list) else [value]:
                groups += parameter_groups(table)
    return groups


def _refuse_others(dcp: DcpFolder) -> None:
    """Refuse optimizer state in an unsupported form."""
    keys = sorted(key for key in (*dcp.tensors, *dcp.values) if _is_optimizers(key))
    if keys:
        raise _partial_optimizer(dcp.path, f"{count_of(len(keys), 'key')}: {', '.join(keys[:5])} ...")


def _partial_optimizer(path: Path, content: str) -> MismatchError:
    return MismatchError(
        "A Megatron checkpoint holds optimizer state in an unsupported form",
        where=path,
        expected="exp_avg and exp_avg_sq for every parameter by name, or buckets of dp_reshardable",
        found=content,
        fix="Save it with --dist-ckpt-optim-fully-reshardable and one Adam for all parameters, or import the weights "
        "alone with --weights-only.",
    )


def _step(groups: Sequence[Mapping[str, Any]], common: Mapping[str, Any], iteration: int, *, where: object) -> float:
    """Return the optimizer's step count, shared by all parameters."""
    step = common_step([*(group.get("step") for group in groups), *_common_steps(common)], where=where)
    if step is None:
        _log.warning(f"The optimizer has no step count: assumed to be the iteration, {iteration}")
    return float(iteration) if step is None else step


def _common_steps(table: object) -> list[Any]:
    """Return an undistributed optimizer's `common_step`."""
    if not isinstance(table, Mapping):
        return []
    state = table.get("state")
    steps = [state["common_step"]] if isinstance(state, Mapping) and "common_step" in state else []
    return steps or _common_steps(table.get("optimizer"))
