"""Reads a torch.distributed.checkpoint folder: its metadata, which is a pickle, and its values by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.format import Box, intersect, relative, whole
from reprise.storage import failed_read, is_dir, is_file, is_file_name, matching, read_regular, shown
from reprise.tensors import canonical_name
from trainer.interop.formats import listed
from trainer.interop.torch_file import (
    FilePart,
    ForeignClass,
    PickleProblem,
    attributes_of,
    load_plain,
    unpickle_records,
)

METADATA = ".metadata"
_MOST_METADATA_BYTES = 4 << 30  # 200 bytes per chunk: room for twenty million

# Files in similar checkpoints, with advice.
_OTHER_FORMS = {
    "__*.metadata": "Each rank wrote it separately (use_collectives=False): save it again with use_collectives=True.",
    "model_0.pt": "torch_checkpointing wrote it without a table of its ranks' parts: save it with a resharder for each "
    "item, ItemSpec(resharder=DefaultResharder()).",
    "*.safetensors": "It holds safetensors files: import it as `hf`.",
}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A value in a file.

    Args:
        read: Returns it, once the file is found to reach to `end`.
    """

    file: Path
    end: int
    read: Callable[[], Any]

    @classmethod
    def of(cls, file: Path, value: Any) -> StoredPart:
        """Return a value from an open file, or a mapped tensor."""
        return cls(file, 0, lambda: value)


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor in the folder: its full shape, its dtype, and the chunks tiling it, each with its part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[Box, StoredPart]


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """A DCP folder with validated metadata and all its files.

    Args:
        tensors: Every tensor by its key.
        values: All other values by key, each pickled separately.
    """

    path: Path
    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, StoredPart]

    def read_tensor(self, key: str) -> torch.Tensor:
        """Return a full tensor on the CPU. Only a single chunk is in memory beside it.

        Raises:
            CheckpointError: A chunk is damaged, or does not hold a tensor.
        """
        return self.read_box(key, (0,) * len(self.tensors[key].shape), self.tensors[key].shape)

    def read_box(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor's box on the CPU. Only a single chunk is in memory beside it.

        Raises:
            CheckpointError: A chunk is damaged, or does not hold a tensor.
        """
        box, stored = Box(tuple(offset), tuple(shape)), self.tensors[key]
        target = torch.empty(box.shape, dtype=stored.dtype)
        for chunk, place in stored.chunks.items():
            part = intersect(chunk, box)
            if part.numel:
                values = self._read(key, place)
                if not isinstance(values, torch.Tensor) or tuple(values.shape) != chunk.shape:
                    raise _damaged(key, place, f"{shown(values)}, not a tensor of shape {list(chunk.shape)}")
                target[relative(part, box).slices] = values[relative(part, chunk).slices]
        return target

    def read_value(self, key: str) -> object:
        """Return a value other than a tensor, or a 0-d tensor as a number.

        Raises:
            CheckpointError: The value is damaged.
        """
        value = self.read_tensor(key) if key in self.tensors else self._read(key, self.values[key])
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    def _read(self, key: str, place: StoredPart) -> Any:
        try:
            return place.read()
        except PickleProblem as error:
            raise _damaged(key, place, str(error)) from None


def _damaged(key: str, place: StoredPart, actual: str) -> CheckpointError:
    return CheckpointError(
        "A value in a DCP folder is damaged",
        where=f"{place.file}, {key}",
        found=actual,
        fix="Import another checkpoint; this one cannot be trusted.",
    )


def open_folder(path: Path, *, trust_pickle: bool) -> DcpFolder:
    """Read and validate a DCP folder's metadata, and require all its files.

    Raises:
        CheckpointError: `path` is not such a folder, `trust_pickle` is not set, or a part is missing or damaged.
        MismatchError: The metadata names other programs' classes.
    """
    file = path / METADATA
    if not is_file(file):
        raise _no_folder(path)
    if not trust_pickle:
        raise CheckpointError(
            "A DCP folder's metadata is a pickle, and reading a pickle can run code",
            where=file,
            fix="If you trust its author, add --trust-pickle. Even then only torch's own metadata classes are "
            "accepted.",
        )
    folder, problems = _described(path, attributes_of(read_metadata(file)))
    return require_whole(folder, problems)


def require_whole(folder: DcpFolder, problems: Sequence[str] = ()) -> DcpFolder:
    """Return a folder after checking for missing files and chunks.

    Args:
        problems: Problems already found in its metadata.

    Raises:
        CheckpointError: There are problems. The error lists them.
    """
    every = [*problems, *_tiling_problems(folder), *_missing_files(folder)]
    if every:
        raise CheckpointError("A DCP folder is incomplete", where=folder.path, found=listed(every, "problem"))
    return folder


def _no_folder(path: Path) -> CheckpointError:
    if not is_dir(path):
        return CheckpointError("The folder to import does not exist", where=path, fix="Correct the path.")
    below = sorted(child.name for child in path.iterdir() if is_file(child / METADATA))
    if below:
        return CheckpointError(
            "A folder is not a DCP checkpoint, but contains some",
            where=path,
            found=", ".join(below),
            fix="Pass one of them.",
        )
    fix = next((advice for pattern, advice in _OTHER_FORMS.items() if matching(path, pattern)), None)
    return CheckpointError("A folder is not a DCP checkpoint", where=path, expected=f"a file {METADATA}", fix=fix)


def read_metadata(file: Path) -> Any:
    """Return the content of a metadata file.

    Raises:
        CheckpointError: The file is damaged.
        MismatchError: It names other programs' classes.
    """
    try:
        return unpickle_records(read_regular(file, limit_bytes=_MOST_METADATA_BYTES))
    except OSError as error:
        raise failed_read("A DCP metadata file cannot be read", error, where=file) from error
    except ForeignClass as error:
        raise MismatchError(
            "A DCP metadata file contains classes other than torch's own",
            where=file,
            found=str(error),
            fix="Another program or an unknown torch release wrote it, or it is damaged. If that program can save a "
            "Hugging Face folder, import that as `hf`.",
        ) from None
    except PickleProblem as error:
        raise CheckpointError(
            "A DCP metadata file cannot be read",
            where=file,
            found=str(error),
            fix="It is damaged, or its writer was killed. Import another checkpoint.",
        ) from None


def _described(path: Path, metadata: Mapping[str, Any]) -> tuple[DcpFolder, list[str]]:
    """Return the folder described by the metadata, and its tensors' problems.

    A compiled module adds `_orig_mod` to its keys, which is removed here.
    """
    tensors, values, problems = dict[str, DcpTensor](), dict[str, StoredPart](), list[str]()
    table = metadata["state_dict_metadata"]
    renamed = {canonical_name(key): key for key in table}
    if len(renamed) < len(table):  # two models share a key once the prefix is removed
        renamed = {key: key for key in table}
    places = dict[tuple[str, tuple[int, ...]], StoredPart]()
    for index, info in metadata["storage_data"].items():
        where, place = attributes_of(info), attributes_of(index)
        name, offset, length = where["relative_path"], int(where["offset"]), int(where["length"])
        if not is_file_name(name) or min(offset, length) < 0:
            problems.append(f"{shown(name)}: not part of a file in the folder")
        read = partial(_read_part, path / name, offset, length)
        places[place["fqn"], tuple(place.get("offset") or ())] = StoredPart(path / name, offset + length, read)
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
    return DcpFolder(path, tensors, values), problems


def _read_part(file: Path, offset: int, length: int) -> Any:
    with FilePart(file, offset, length) as part:
        return load_plain(part)


def _tiling_problems(folder: DcpFolder) -> Iterator[str]:
    """Yield tensors whose chunks do not tile them."""
    for key, tensor in folder.tensors.items():
        numbers = sum(intersect(chunk, whole(tensor.shape)).numel for chunk in tensor.chunks)
        if numbers != prod(tensor.shape):
            yield f"{key}: its chunks hold {numbers} of {prod(tensor.shape)} elements"


def _missing_files(folder: DcpFolder) -> Iterator[str]:
    """Yield missing files, and files too short for their parts."""
    ends = dict[Path, int]()
    for part in (*folder.values.values(), *(part for t in folder.tensors.values() for part in t.chunks.values())):
        ends[part.file] = max(ends.get(part.file, 0), part.end)
    for file, end in ends.items():
        size = file.stat().st_size if file.parent == folder.path and is_file(file) else 0
        if size < end:
            yield f"{shown(file.name)}: {size} B, expected at least {end} B"
