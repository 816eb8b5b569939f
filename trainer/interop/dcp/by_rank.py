"""Reads folders with a file per rank: torch_checkpointing's, and transformers' sharded models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from numpy import unravel_index

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
    """Return the tensors described by the table of all ranks, which omits items without a resharder.

    Source: `DistributedMetadata.to_dict`, torch_checkpointing 0.1.1.
    """
    table = read_records(path / TABLE)
    if table["version"] != _VERSION:
        raise ValueError(f"version {table['version']}, not {_VERSION}")
    tensors = dict[str, DcpTensor]()
    for item, entry in table["metadata"].items():
        content = cache(partial(_content, path, item))
        for place, groups in entry["nested_path_to_metadata"].items():
            keys = json.loads(place)
            name = canonical_name(".".join(map(str, (item, *keys))))
            tensors[name] = _tensor(groups, keys, content)
    return DcpFolder(path, tensors, {})


def _content(path: Path, item: str, rank: int) -> Any:
    """Return a rank's content of an item."""
    import torch.distributed.tensor  # noqa: F401 - makes the weights-only reader accept DTensors

    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # warns about every mesh without ranks
    if not is_file_name(item):
        raise ValueError(f"{item[:200]}, which is not an item in the folder")
    return read_torch_file(path / f"{item}_{rank}.pt")


def _tensor(groups: Sequence[Any], keys: Sequence[Any], content: Callable[[int], Any]) -> DcpTensor:
    """Return a tensor from the table.

    Args:
        groups: Placements, each with its ranks.
        keys: Where the tensor's part is in a rank's content.
        content: Returns a rank's content.
    """
    chunks = dict[Box, Part]()
    for group in groups:
        packed = group["sharding_metadata"]
        if packed["type"] != "DTensorShardingMetadata":
            raise ValueError(f"a tensor placed by {packed['type']}")
        placed, mesh = packed["data"], packed["data"]["mesh_spec"]
        shape, dtype = tuple(placed["global_shape"]), getattr(torch, placed["dtype"].removeprefix("torch."))
        for rank in group["ranks"]:
            place = map(int, unravel_index(mesh["mesh_data"].index(rank), mesh["mesh_shape"]))
            axes = zip(placed["placements"], place, mesh["mesh_shape"], strict=True)
            splits = [Split(p["dim"], at, n, p.get("split_factor", 1)) for p, at, n in axes if p["type"] != "Replicate"]
            box = box_of_splits(shape, splits)
            if box.numel and box not in chunks:  # a replica's file stays closed
                chunks[box] = held(local_of(reduce(getitem, keys, content(rank))))
    return DcpTensor(shape, dtype, chunks)


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
