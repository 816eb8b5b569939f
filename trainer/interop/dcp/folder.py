"""A torch.distributed.checkpoint folder: its metadata, and its values by key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from reprise.errors import CheckpointError, count_of
from reprise.files import is_dir, is_file, is_file_name, matching
from reprise.json_file import shown
from reprise.layout import Box, intersect, relative
from reprise.live_tensors import canonical_name
from trainer.interop.dcp.metadata import read_metadata, unsound
from trainer.interop.plain_pickle import PickleProblem
from trainer.interop.torch_file import PlainObject, load_plain, mapped

METADATA = ".metadata"

# Files of similar checkpoints, with what to do about them.
_OTHER_FORMS = {
    "__*.metadata": "It was written by ranks on their own (use_collectives=False); save it again with collectives.",
    "metadata.pkl": "It was written by torch_checkpointing, as torchtitan does now: load it with its CheckpointLoader, "
    "and save the state with torch.distributed.checkpoint.save.",
    "shard-*-model-*.safetensors": "transformers wrote its shards rank by rank: merge them with "
    "transformers.distributed.consolidate_distributed_checkpoint, and import the result as `hf`.",
    "*.safetensors": "It holds safetensors files: import it as `hf`.",
}


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of the folder: its full shape and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _canonical(metadata: Metadata) -> Metadata:
    """Return metadata with its keys as without compilation: each compiled module adds `_orig_mod` to them."""
    table = {canonical_name(key): entry for key, entry in metadata.state_dict_metadata.items()}
    if len(table) < len(metadata.state_dict_metadata):  # the same key with and without it: two models
        return metadata
    storage = {replace(index, fqn=canonical_name(index.fqn)): i for index, i in metadata.storage_data.items()}
    return replace(metadata, state_dict_metadata=table, storage_data=storage)


class DcpFolder:
    """A DCP folder with validated metadata and all its files.

    Attributes:
        tensors: every tensor by its key.
        values: the keys of everything else; each is a pickle of its own.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path = path
        self._metadata = _canonical(metadata)
        table = self._metadata.state_dict_metadata
        self.tensors = {
            key: DcpTensor(tuple(entry.size), entry.properties.dtype)
            for key, entry in table.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.values = frozenset(key for key, entry in table.items() if isinstance(entry, BytesStorageMetadata))

    def read_tensor(self, key: str) -> torch.Tensor:
        """Return a full tensor on the CPU, assembled from its chunks with a single chunk in memory.

        Raises:
            CheckpointError: if a chunk is damaged, or does not hold a tensor.
        """
        return self.read_box(key, (0,) * len(self.tensors[key].shape), self.tensors[key].shape)

    def read_box(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor on the CPU, assembled from its chunks with a single chunk in memory.

        Raises:
            CheckpointError: if a chunk is damaged, or does not hold a tensor.
        """
        box = Box(tuple(offset), tuple(shape))
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        target = torch.empty(box.shape, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            of_chunk = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            part = intersect(of_chunk, box)
            if part.numel:
                values = self._tensor(MetadataIndex(key, chunk.offsets), of_chunk.shape)
                target[relative(part, box).slices] = values[relative(part, of_chunk).slices]
        return target

    def fragments(self, key: str) -> tuple[int, ...]:
        """Return the number of distinct offsets of a tensor's chunks in each dimension."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return tuple(len({chunk.offsets[dim] for chunk in entry.chunks}) for dim in range(len(entry.size)))

    def read_value(self, key: str, placeholder: type[PlainObject] | None = None) -> object:
        """Return a value other than a tensor, or a 0-d tensor as a number.

        Args:
            placeholder: replaces objects of other classes, see `load_plain`; by default they are refused.

        Raises:
            CheckpointError: if it is damaged, or is anything except numbers, strings, lists and dictionaries of them.
        """
        if key in self.tensors:
            return self.read_tensor(key).item()
        return self._read(MetadataIndex(key), placeholder)

    def _tensor(self, index: MetadataIndex, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor of a chunk."""
        value = self._read(index, None)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
            raise self._damaged(index, f"{shown(value)}, no tensor of shape {list(shape)}")
        return value

    def _read(self, index: MetadataIndex, placeholder: type[PlainObject] | None) -> Any:
        """Return what `torch.save` wrote to a part of a file."""
        info = self._metadata.storage_data[index]
        file = self.path / info.relative_path
        if info.transform_descriptors:
            raise self._damaged(index, "values that an extension of torch compressed or encrypted")
        try:
            return load_plain(mapped(file, info.offset + info.length)[info.offset :], placeholder)
        except PickleProblem as error:
            raise self._damaged(index, str(error)) from None

    def _damaged(self, index: MetadataIndex, actual: str) -> CheckpointError:
        info = self._metadata.storage_data[index]
        return CheckpointError(
            "A tensor of a DCP folder is damaged"
            if index.fqn in self.tensors
            else "A value of a DCP folder is damaged, or is no plain data",
            where=f"{self.path / info.relative_path}, {index.fqn}, bytes from {info.offset} on",
            found=actual,
            fix="Import another checkpoint; this one cannot be trusted.",
        )


def open_folder(path: Path, *, trust_pickle: bool, with_plans: bool = False) -> DcpFolder:
    """Read and validate the metadata of a DCP folder, and require all its files.

    Args:
        with_plans: whether the metadata may hold plans of the save, as Megatron-Core's does.

    Raises:
        CheckpointError: if `path` is not such a folder, `trust_pickle` is not set, or anything is missing or damaged.
    """
    file = path / METADATA
    if not is_file(file):
        raise _no_folder(path)
    if not trust_pickle:
        raise CheckpointError(
            "The metadata of a DCP folder is a pickle, and to read a pickle can run code",
            where=file,
            fix="If you trust who wrote it, say so with --trust-pickle. Even then nothing is admitted but the classes "
            "of torch's own metadata.",
        )
    metadata = read_metadata(file, with_plans=with_plans)
    problems = [*unsound(metadata), *_missing_files(path, metadata)]
    if problems:
        listing = "".join(f"\n  {problem}" for problem in problems[:20])
        raise CheckpointError(
            "A DCP folder is not whole", where=path, found=f"{count_of(len(problems), 'problem')}:{listing}"
        )
    return DcpFolder(path, metadata)


def _no_folder(path: Path) -> CheckpointError:
    if not is_dir(path):
        return CheckpointError("There is no folder to import", where=path, fix="Correct the path.")
    below = sorted(child.name for child in path.iterdir() if is_file(child / METADATA))
    if len(below) == 1:
        return CheckpointError(
            "A folder is no DCP checkpoint, it holds one", where=path, found=below[0], fix=f"Name {path / below[0]}."
        )
    if below:
        return CheckpointError(
            "A folder holds several DCP checkpoints", where=path, found=", ".join(below), fix="Name one of them."
        )
    fix = next((advice for pattern, advice in _OTHER_FORMS.items() if matching(path, pattern)), None)
    return CheckpointError("A folder is no DCP checkpoint", where=path, expected=f"a file {METADATA}", fix=fix)


def _missing_files(path: Path, metadata: Metadata) -> Iterable[str]:
    """Yield the files missing, outside the folder, or too short for their parts."""
    ends, totals = dict[str, int](), dict[str, int]()
    storage = metadata.storage_data
    for info in storage.values() if isinstance(storage, dict) else ():
        name, offset, length = (getattr(info, field, None) for field in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not is_file_name(name):
            yield f"{shown(name)}: no name of a file in the folder"
        elif not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
            yield f"{name}: no offset and length"
        else:
            ends[name] = max(ends.get(name, 0), offset + length)
            totals[name] = totals.get(name, 0) + length
    for name, end in ends.items():
        if not is_file(path / name):
            yield f"{name}: no such file"
        elif (path / name).stat().st_size < end:
            yield f"{name}: {(path / name).stat().st_size} B, expected at least {end} B"
        elif (path / name).stat().st_size < totals[name]:
            yield f"{name}: its parts overlap"
