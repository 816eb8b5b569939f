"""Reads a torch.distributed.checkpoint folder: its metadata, which is a pickle, and its values by key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from reprise.errors import CheckpointError
from reprise.format import Box, intersect, relative, whole
from reprise.storage import is_file, is_file_name, matching, shown
from reprise.tensors import canonical_name
from trainer.interop.formats import ImportOptions, few, listed, require_trust
from trainer.interop.torch_file import attributes_of, read_records, read_torch_file

METADATA = ".metadata"

# Files in similar checkpoints, with advice.
_OTHER_FORMS = {
    "__*.metadata": "Each rank wrote it separately (use_collectives=False): save it again with use_collectives=True.",
    "model_0.pt": "torch_checkpointing wrote it without a table of its ranks' parts: save it with a resharder for each "
    "item, ItemSpec(resharder=DefaultResharder()).",
    "*.safetensors": "It holds safetensors files: import it as `hf`.",
}


# Returns a part of a tensor, or another value.
Part = Callable[[], Any]


def held(value: Any) -> Part:
    """Return a value from an open file, or a mapped tensor, as a part."""
    return lambda: value


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor in the folder: its full shape, its dtype, and the chunks tiling it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[Box, Part]


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """A DCP folder with validated metadata and all its files.

    Args:
        tensors: Every tensor by its key.
        values: All other values by key, each pickled separately.
    """

    path: Path
    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Part]

    def read_tensor(self, key: str) -> torch.Tensor:
        """Return a full tensor on the CPU. A single chunk is in memory beside it.

        Raises:
            CheckpointError: A chunk is damaged.
            ValueError: A chunk does not hold a tensor.
        """
        return self.read_box(key, whole(self.tensors[key].shape))

    def read_box(self, key: str, box: Box) -> torch.Tensor:
        """Return a tensor's box on the CPU. See `read_tensor`."""
        stored = self.tensors[key]
        target = torch.empty(box.shape, dtype=stored.dtype)
        for chunk, read in stored.chunks.items():
            part = intersect(chunk, box)
            if part.numel:
                values: torch.Tensor = read()
                if tuple(values.shape) != chunk.shape:
                    raise ValueError(f"{key}: {shown(values)}, not of shape {list(chunk.shape)}")
                if chunk == box:
                    return values.to(stored.dtype)
                target[relative(part, box).slices] = values[relative(part, chunk).slices]
        return target

    def read_value(self, key: str) -> Any:
        """Return a value other than a tensor, or a 0-d tensor as a number.

        Raises:
            CheckpointError: The value is damaged.
        """
        value = self.read_tensor(key) if key in self.tensors else self.values[key]()
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def open_folder(path: Path, options: ImportOptions) -> DcpFolder:
    """Read and validate a DCP folder's metadata, and require all its files.

    Raises:
        ConfigError: Pickles are not trusted.
        CheckpointError: `path` is not such a folder, or a part is missing or damaged.
    """
    file = path / METADATA
    if not is_file(file):
        raise CheckpointError(
            "A folder is not a DCP checkpoint",
            where=path,
            expected=f"a file {METADATA}",
            found=few(child.name for child in path.iterdir()),
            fix=next((advice for pattern, advice in _OTHER_FORMS.items() if matching(path, pattern)), None),
        )
    require_trust(options, "DCP", where=file)
    folder, ends = _described(path, attributes_of(read_records(file)))
    return require_whole(folder, _missing_files(ends))


def require_whole(folder: DcpFolder, problems: Iterable[str] = ()) -> DcpFolder:
    """Return a folder after checking for missing chunks.

    Args:
        problems: Other problems.

    Raises:
        CheckpointError: There are problems. The error lists them.
    """
    if problems := [*_tiling_problems(folder), *problems]:
        raise CheckpointError("A DCP folder is incomplete", where=folder.path, found=listed(problems, "problem"))
    return folder


def _described(path: Path, metadata: Mapping[str, Any]) -> tuple[DcpFolder, Mapping[Path, int]]:
    """Return the folder described by the metadata, and where each file's last part ends.

    A compiled module adds `_orig_mod` to its keys, which is removed here.
    """
    tensors, values, table = dict[str, DcpTensor](), dict[str, Part](), metadata["state_dict_metadata"]
    renamed = {canonical_name(key): key for key in table}
    if len(renamed) < len(table):  # two models share a key once the prefix is removed
        renamed = {key: key for key in table}
    places, ends = dict[tuple[str, tuple[int, ...]], Part](), dict[Path, int]()
    for index, info in metadata["storage_data"].items():
        where, place = attributes_of(info), attributes_of(index)
        name, offset, length = where["relative_path"], int(where["offset"]), int(where["length"])
        if not is_file_name(name) or min(offset, length) < 0:
            raise ValueError(f"{shown(name)}: not part of a file in the folder")
        file = path / name
        ends[file] = max(ends.get(file, 0), offset + length)
        places[place["fqn"], tuple(place.get("offset") or ())] = partial(read_torch_file, file, (offset, length))
    for name, key in renamed.items():
        entry = attributes_of(table[key])
        if "size" not in entry:
            values[name] = places[key, ()]
            continue
        boxes = [attributes_of(chunk) for chunk in entry["chunks"]]
        chunks = {Box(tuple(b["offsets"]), tuple(b["sizes"])): places[key, tuple(b["offsets"])] for b in boxes}
        shape, dtype = tuple(map(int, entry["size"])), entry["properties"].values[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{shown(dtype)} as a dtype")
        tensors[name] = DcpTensor(shape, dtype, chunks)
    return DcpFolder(path, tensors, values), ends


def _tiling_problems(folder: DcpFolder) -> Iterator[str]:
    """Yield tensors whose chunks do not tile them."""
    for key, tensor in folder.tensors.items():
        numbers = sum(intersect(chunk, whole(tensor.shape)).numel for chunk in tensor.chunks)
        if numbers != prod(tensor.shape):
            yield f"{key}: its chunks hold {numbers} of {prod(tensor.shape)} elements"


def _missing_files(ends: Mapping[Path, int]) -> Iterator[str]:
    """Yield missing files, and files too short for their parts."""
    for file, end in ends.items():
        size = file.stat().st_size if is_file(file) else 0
        if size < end:
            yield f"{shown(file.name)}: {size} B, expected at least {end} B"
