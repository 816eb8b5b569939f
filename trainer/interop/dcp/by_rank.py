"""Reads folders with a file per rank: torch_checkpointing's, and transformers' sharded models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from reprise.format import Box, Split, box_of_splits
from reprise.storage import is_file, is_file_name, matching
from reprise.tensors import canonical_name, local_of
from trainer.interop.dcp.folder import (
    METADATA,
    DcpFolder,
    DcpTensor,
    Part,
    held,
    open_folder,
    require_whole,
)
from trainer.interop.formats import ImportOptions, require_trust
from trainer.interop.hf.folder import SHARDS, opened
from trainer.interop.torch_file import read_records, read_torch_file

TABLE = "metadata.pkl"
_VERSION = "2.0"
_OFFSETS = "DCP_SHARDING_INFO"


def open_any(path: Path, options: ImportOptions) -> DcpFolder:
    """Open a folder from DCP, torch_checkpointing, or transformers' `save_pretrained(distributed_checkpoint=True)`.

    transformers saves the optimizer with DCP, possibly in the same folder.

    Raises:
        ConfigError: Pickles are not trusted.
        CheckpointError: `path` is not such a folder, or is damaged.
    """
    if is_file(path / TABLE):
        require_trust(options, "torch_checkpointing", where=path)
        return require_whole(_read_torch_checkpointing(path))
    shards = matching(path, SHARDS)
    is_dcp = is_file(path / METADATA) or not shards
    folder = open_folder(path, options) if is_dcp else DcpFolder(path, {}, {})
    return require_whole(replace(folder, tensors={**folder.tensors, **_read_shards(shards)}))


def _read_torch_checkpointing(path: Path) -> DcpFolder:
    """Return the tensors described by the table of all ranks, and rank 0's values.

    Source: `DistributedMetadata.to_dict`, torch_checkpointing 0.1.1. The table omits items without a resharder.
    """
    table = read_records(path / TABLE)
    if table["version"] != _VERSION:
        raise ValueError(f"version {table['version']}, not {_VERSION}")
    tensors, values = dict[str, DcpTensor](), dict[str, Any]()
    items: dict[str, Any] = {file.name.removesuffix("_0.pt"): {} for file in matching(path, "*_0.pt")}
    for item, entry in {**items, **table["metadata"]}.items():
        leaves = cache(partial(_leaves, path, item, entry.get("rank_to_layout_info", {})))
        described = entry.get("nested_path_to_metadata", {})
        for keys, groups in described.items():
            path_in_item = tuple(json.loads(keys))
            tensors[_joined(item, path_in_item)] = _tensor(path_in_item, groups, leaves)
        values |= {name: leaf for keys, leaf in leaves(0).items() if (name := _joined(item, keys)) not in tensors}
    return DcpFolder(path, tensors, values)


def _tensor(
    keys: tuple[str | int, ...], groups: Sequence[Any], leaves: Callable[[int], Mapping[Any, Part]]
) -> DcpTensor:
    """Return a tensor from the table.

    Args:
        keys: The tensor's keys in a rank's file.
        groups: Placements, each with its ranks.
        leaves: Returns a rank's file content by keys.
    """
    chunks = dict[Box, Part]()
    for group in groups:
        packed = group["sharding_metadata"]
        if packed["type"] != "DTensorShardingMetadata":
            raise ValueError(f"a tensor placed by {packed['type']}")
        placed = packed["data"]
        shape, dtype = tuple(placed["global_shape"]), getattr(torch, placed["dtype"].removeprefix("torch."))
        for rank in group["ranks"]:
            if (box := _box(shape, placed, rank)).numel and box not in chunks:  # a replica's file stays closed
                chunks[box] = leaves(rank)[keys]
    return DcpTensor(shape, dtype, chunks)


def _box(shape: tuple[int, ...], placed: Mapping[str, Any], rank: int) -> Box:
    """Return a rank's box in a tensor."""
    mesh, splits = placed["mesh_spec"], list[Split]()
    at = mesh["mesh_data"].index(rank)
    for size, placement in reversed([*zip(mesh["mesh_shape"], placed["placements"], strict=True)]):
        at, index = divmod(at, size)
        if placement["type"] != "Replicate":
            splits.insert(0, Split(placement["dim"], index, size, placement.get("split_factor", 1)))
    return box_of_splits(shape, splits)


def _leaves(path: Path, item: str, layouts: Mapping[int, Any], rank: int) -> dict[tuple[str | int, ...], Part]:
    """Return a rank's file content by keys. A DTensor is represented by its local part."""
    import torch.distributed.tensor  # makes the weights-only reader accept DTensors

    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # warns about every mesh without ranks
    layout = layouts.get(rank) or {"file_path": f"{item}_{rank}.pt"}
    name = layout["file_path"]
    if not is_file_name(name) or not name.endswith(".pt"):
        raise ValueError(f"{name[:200]} for {item} of rank {rank}, which is not a torch file in the folder")

    def walk(value: Any, keys: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Part]]:
        members = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
        if members is None:
            yield keys, held(local_of(value) if isinstance(value, torch.Tensor) else value)
        for key, member in members or ():
            yield from walk(member, (*keys, key))

    return dict(walk(read_torch_file(path / name), ()))


def _joined(item: str, keys: Sequence[object]) -> str:
    return canonical_name(".".join(map(str, (item, *keys))))


def _read_shards(files: Sequence[Path]) -> dict[str, DcpTensor]:
    """Return the tensors in the ranks' safetensors files. Each file states its parts' offsets.

    Source: torch's `HuggingFaceStorageWriter(save_distributed=True)`, which transformers 5.23 and 5.24 use.
    """
    parts = dict[str, dict[Box, Part]]()
    for file in files:
        with opened(file) as content:
            for name, info in json.loads((content.metadata() or {})[_OFFSETS]).items():
                tensor = content.get_tensor(name)
                box = Box(tuple(map(int, info["saved_offsets"])), tuple(tensor.shape))
                parts.setdefault(name, {})[box] = held(tensor)
    tensors = dict[str, DcpTensor]()
    for name, boxes in parts.items():
        shape = tuple(map(max, zip(*(box.end for box in boxes), strict=True)))
        tensors[name] = DcpTensor(shape, next(iter(boxes.values()))().dtype, boxes)
    return tensors
