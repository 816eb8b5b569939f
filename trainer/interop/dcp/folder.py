"""A torch.distributed.checkpoint folder: its metadata, and its values one by one, by key.

The metadata is a pickle. It is read by an unpickler that admits the classes of torch's own metadata and no others.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

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
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from trainer.checkpoint.format.box import Box, intersect
from trainer.errors import CheckpointError, MismatchError

METADATA = ".metadata"
_BLOCK_BYTES = 4 << 20
_MOST_METADATA_BYTES = 4 << 30  # 200 bytes for each chunk: room for twenty million

_ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
}
# Older torch writes the folder's own path, which is not used, as a class of the system that wrote it.
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class _ForeignClass(pickle.UnpicklingError):
    """A class that is not admitted."""


class _Unpickler(pickle._Unpickler):
    """Admits the classes of DCP's metadata, `torch.Size`, dtypes and paths, and refuses every other name.

    It is Python's own unpickler written in Python: the one in C allocates memory for any number of values a damaged
    file names.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            found = getattr(torch, name, None)
            if found is torch.Size or isinstance(found, torch.dtype):
                return found
        elif module in ("pathlib", "pathlib._local") and name in _PATHS:
            return pathlib.PurePath
        elif name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise _ForeignClass(f"{module}.{name}, which is no part of DCP's metadata")


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

    def _check_chunks(self, key: str) -> None:
        """Compare the checksums in the files of a tensor, which torch writes but ignores when it loads."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
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
    """Return the error of the first damaged member of a zip file; a file that is not a zip is not judged.

    torch writes 0 for all checksums if it is set to leave them out.
    """
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    return f"{member.filename} is compressed, as torch writes nothing, and may become of any size"
                if member.CRC:
                    with archive.open(member) as part:
                        while part.read(_BLOCK_BYTES):
                            pass
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        return f"another checksum: {error}"
    return None


def open_folder(path: Path, *, trust_pickle: bool) -> DcpFolder:
    """Read and validate the metadata of a DCP folder, and check that all its files exist.

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
    metadata = _read_metadata(file)
    found = [*_unsound(metadata), *_missing_files(path, metadata)]
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


def _read_metadata(file: Path) -> Metadata:
    size = file.stat().st_size
    if size > _MOST_METADATA_BYTES:
        raise CheckpointError("A DCP metadata file is too large", where=file, found=f"{size} B")
    try:
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except OSError as error:
        raise CheckpointError("A DCP metadata file cannot be read", where=file, found=error.strerror) from error
    except _ForeignClass as error:
        raise MismatchError(
            "A DCP metadata file holds more than torch's own classes",
            where=file,
            expected="a pickle of torch.distributed.checkpoint.metadata.Metadata and nothing else",
            found=str(error),
            fix="Another program than torch wrote it, or a release of torch that is not known here, or it is damaged. "
            "Where that program can save a Hugging Face folder, import that as `hf`.",
        ) from None
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise CheckpointError(
            "A DCP metadata file cannot be read",
            where=file,
            expected="a pickle of torch.distributed.checkpoint.metadata.Metadata",
            found=f"{str(error) or type(error).__name__}" if size else "an empty file",
            fix="It is damaged, or its writer was killed; import another checkpoint.",
        ) from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError("A DCP metadata file holds something else", where=file, found=type(metadata).__name__)
    return metadata


def _unsound(metadata: Metadata) -> Iterable[str]:
    """Yield problems of the metadata: types, and tensors that their chunks do not fill."""
    table, storage = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    if not isinstance(table, dict) or not isinstance(storage, dict):
        yield "the metadata has no tables of values and of where they lie"
        return
    for key, entry in table.items():
        if not isinstance(key, str):
            yield f"a key is no string: {key!r}"
        elif isinstance(entry, TensorStorageMetadata):
            problem = _unsound_tensor(key, entry, storage)
            if problem is not None:
                yield f"{key}: {problem}"
        elif not isinstance(entry, BytesStorageMetadata):
            yield f"{key}: neither a tensor nor bytes"
        elif MetadataIndex(key) not in storage:
            yield f"{key}: lies nowhere"


def _unsound_tensor(key: str, entry: TensorStorageMetadata, storage: dict[Any, Any]) -> str | None:
    size, chunks = getattr(entry, "size", None), getattr(entry, "chunks", None)
    properties = getattr(entry, "properties", None)
    if not (_is_size(size) and isinstance(chunks, list) and isinstance(properties, TensorProperties)):
        return "no size, chunks or properties"
    if not isinstance(getattr(properties, "dtype", None), torch.dtype):
        return "no dtype"
    filled = dict[tuple[int, ...], tuple[int, ...]]()
    for chunk in chunks:
        offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        if not (isinstance(chunk, ChunkStorageMetadata) and _is_size(offsets) and _is_size(sizes)):
            return "a chunk without an offset and a size"
        inside = zip(offsets, sizes, size, strict=False)
        if not len(offsets) == len(sizes) == len(size) or any(o + s > n for o, s, n in inside):
            return f"a chunk at {list(offsets)} of shape {list(sizes)} is not inside {list(size)}"
        if MetadataIndex(key, offsets) not in storage:
            return f"the chunk at {list(offsets)} lies nowhere"
        filled[tuple(offsets)] = tuple(sizes)
    held = sum(math.prod(sizes) for sizes in filled.values())
    if held != math.prod(size):
        return f"its chunks hold {held} of {math.prod(size)} elements"
    return "its chunks overlap" if _overlap(filled) else None


def _overlap(boxes: dict[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Return whether boxes, sizes by offset, share an element.

    Boxes are compared that a sweep over one dimension meets at once; it is the dimension with the most distinct
    offsets.
    """
    if len(boxes) < 2:
        return False
    dim = max(range(len(next(iter(boxes)))), key=lambda d: len({offset[d] for offset in boxes}))
    open_boxes = list[Box]()
    for box in sorted((Box(*pair) for pair in boxes.items() if math.prod(pair[1])), key=lambda b: b.offset[dim]):
        open_boxes = [other for other in open_boxes if other.end[dim] > box.offset[dim]]
        if any(intersect(box, other).numel for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _is_size(value: object) -> TypeGuard[torch.Size]:
    return isinstance(value, torch.Size) and all(0 <= n < 2**62 for n in value)


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
