"""A torch.distributed.checkpoint folder: its metadata, and its values one by one, by key."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from trainer.checkpoint.format.box import Box, intersect
from trainer.errors import CheckpointError
from trainer.interop.dcp.metadata import read_metadata, unsound
from trainer.interop.torch_file import damaged_member

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of the folder: its full shape, its dtype, and its number of chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: int


class DcpFolder:
    """A DCP folder with validated metadata and all its files.

    Attributes:
        tensors: every tensor by its key.
        values: the keys of everything else; each is a pickle of its own.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path = path
        self._metadata = metadata
        table = metadata.state_dict_metadata
        self.tensors = {
            key: DcpTensor(tuple(entry.size), entry.properties.dtype, len(entry.chunks))
            for key, entry in table.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.values = frozenset(key for key, entry in table.items() if isinstance(entry, BytesStorageMetadata))

    def read_tensor(self, key: str) -> torch.Tensor:
        """Return a full tensor on the CPU, assembled from its chunks with one in memory at a time.

        Raises:
            CheckpointError: if a chunk is damaged, or does not hold a tensor.
        """
        stored = self.tensors[key]
        self._check_chunks(key)
        target = torch.empty(stored.shape, dtype=stored.dtype)
        self._load(key, {key: target}, DefaultLoadPlanner())
        return target

    def read_box(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor on the CPU, assembled from the chunks that it meets with one in memory at a time.

        Raises:
            CheckpointError: if a chunk is damaged, or does not hold a tensor.
        """
        box = Box(tuple(offset), tuple(shape))
        self._check_chunks(key, box)
        target = torch.empty(box.shape, dtype=self.tensors[key].dtype)
        if target.numel():
            self._load(key, {key: target}, _BoxPlanner(box, target))
        return target

    def fragments(self, key: str) -> tuple[int, ...]:
        """Return the number of distinct offsets of a tensor's chunks in each dimension."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return tuple(len({chunk.offsets[dim] for chunk in entry.chunks}) for dim in range(len(entry.size)))

    def read_value(self, key: str) -> object:
        """Return a value that is not a tensor, or a 0-d tensor as a number.

        Raises:
            CheckpointError: if it is damaged, or is anything except numbers, strings, lists and dictionaries of them.
        """
        if key in self.tensors:
            return self.read_tensor(key).item()
        planner = _PlainValue()
        self._load(key, {key: None}, planner)
        return planner.value

    def _check_chunks(self, key: str, box: Box | None = None) -> None:
        """Compare the checksums in the files of a tensor, which torch writes but ignores when it loads.

        Args:
            box: the part of the tensor whose chunks are meant; by default all of it.
        """
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            if box is not None and not intersect(Box(tuple(chunk.offsets), tuple(chunk.sizes)), box).numel:
                continue
            info = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            if info.transform_descriptors:
                continue  # compressed or encrypted: what undoes that checks it
            with (self.path / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                damaged = _damaged_part(file.read(info.length))
            if damaged is not None:
                raise CheckpointError(
                    "A tensor of a DCP folder is damaged",
                    where=f"{self.path / info.relative_path}, {key}, bytes from {info.offset} on",
                    found=damaged,
                    fix="Import another checkpoint; this one cannot be trusted.",
                )

    def _load(self, key: str, state: dict[str, Any], planner: LoadPlanner) -> None:
        reader = _Reader(self.path, self._metadata, key)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(state, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            failed, _ = next(iter(error.failures.values()))
            raise CheckpointError(
                "A value of a DCP folder cannot be read",
                where=f"{self.path}, {key}",
                expected="plain data that torch reads with weights_only=True",
                found=f"{type(failed).__name__}: {str(failed).splitlines()[0] if str(failed) else ''}",
                fix="The file is damaged or written by something else; import another checkpoint.",
            ) from None


class _Reader(FileSystemReader):
    """torch's reader of the folder's files, restricted to one key of the metadata read before."""

    def __init__(self, path: Path, metadata: Metadata, key: str) -> None:
        super().__init__(path)
        table = {key: metadata.state_dict_metadata[key]}
        self._shown = Metadata(table, storage_data=metadata.storage_data, storage_meta=StorageMeta())

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._shown


class _BoxPlanner(DefaultLoadPlanner):
    """Reads a box of the only key: torch's own planner reads whole tensors."""

    def __init__(self, box: Box, target: torch.Tensor) -> None:
        super().__init__()
        self._box, self._target = box, target

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        chunk = ChunkStorageMetadata(torch.Size(self._box.offset), torch.Size(self._box.shape))
        found = [
            item
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for item in create_read_items_for_chunk_list(key, entry, [chunk])
        ]
        return LoadPlan(found)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


class _PlainValue(DefaultLoadPlanner):
    """Reads values that are not tensors with `weights_only=True`, unlike torch's own planner: that runs no code."""

    def __init__(self) -> None:
        super().__init__()
        self.value: object = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        damaged = _damaged_part(value.getvalue())
        if damaged is not None:
            raise ValueError(damaged)
        self.value = torch.load(value, map_location="cpu", weights_only=True)


def _damaged_part(data: bytes) -> str | None:
    """Return the error of the first damaged member of a zip file; a file that is not a zip is not judged."""
    return damaged_member(io.BytesIO(data)) if zipfile.is_zipfile(io.BytesIO(data)) else None


def open_folder(path: Path, *, trust_pickle: bool, with_plans: bool = False) -> DcpFolder:
    """Read and validate the metadata of a DCP folder, and check that all its files exist.

    Args:
        with_plans: whether the metadata may hold plans of the save, as Megatron-Core's does.

    Raises:
        CheckpointError: if `path` is not such a folder, `trust_pickle` is not set, or anything is missing or damaged.
    """
    file = path / METADATA
    if not file.is_file():
        raise _no_folder(path)
    if not trust_pickle:
        raise CheckpointError(
            "The metadata of a DCP folder is a pickle, and to read a pickle can run code",
            where=file,
            fix="If you trust who wrote it, say so with --trust-pickle. Even then nothing is admitted but the classes "
            "of torch's own metadata.",
        )
    metadata = read_metadata(file, with_plans=with_plans)
    found = [*unsound(metadata), *_missing_files(path, metadata)]
    if found:
        shown = "".join(f"\n  {problem}" for problem in found[:20])
        raise CheckpointError("A DCP folder is not whole", where=path, found=f"{len(found)} problems:{shown}")
    return DcpFolder(path, metadata)


def _no_folder(path: Path) -> CheckpointError:
    if not path.is_dir():
        return CheckpointError("There is no folder to import", where=path, fix="Correct the path.")
    below = sorted(child.name for child in path.iterdir() if (child / METADATA).is_file())
    if len(below) == 1:
        return CheckpointError(
            "A folder is no DCP checkpoint, it holds one", where=path, found=below[0], fix=f"Name {path / below[0]}."
        )
    if below:
        return CheckpointError(
            "A folder holds several DCP checkpoints", where=path, found=", ".join(below), fix="Name one of them."
        )
    fix = None
    if any(path.glob("__*.metadata")):
        fix = "It was written by ranks on their own (use_collectives=False); save it again with collectives."
    elif any(path.glob("*.safetensors")):
        fix = "It holds safetensors files: import it as `hf`."
    return CheckpointError("A folder is no DCP checkpoint", where=path, expected=f"a file {METADATA}", fix=fix)


def _missing_files(path: Path, metadata: Metadata) -> Iterable[str]:
    """Yield the files that are missing, lie outside the folder, or are too short for their chunks."""
    ends = dict[str, int]()
    storage = metadata.storage_data
    for info in storage.values() if isinstance(storage, dict) else ():
        name, offset, length = (getattr(info, field, None) for field in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or "/" in name or "\0" in name or name in ("", ".", ".."):
            yield f"{name!r}: no name of a file in the folder"
        elif not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
            yield f"{name}: no offset and length"
        else:
            ends[name] = max(ends.get(name, 0), offset + length)
    for name, end in ends.items():
        if not (path / name).is_file():
            yield f"{name}: no such file"
        elif (path / name).stat().st_size < end:
            yield f"{name}: {(path / name).stat().st_size} B, expected at least {end} B"


__all__ = ["DcpFolder", "DcpTensor", "open_folder"]
