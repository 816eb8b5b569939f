"""The metadata of a torch.distributed.checkpoint folder, which is a pickle.

Its unpickler admits the classes of torch's own metadata and no others.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from reprise.errors import CheckpointError, MismatchError
from reprise.files import failed_read, read_regular
from reprise.json_file import shown
from reprise.layout import Box, intersect
from trainer.interop.plain_pickle import ForeignClass, PickleProblem, most_reads, unpickle

_MOST_METADATA_BYTES = 4 << 30  # 200 bytes for each chunk: room for twenty million
_MOST_DIMENSIONS = 64  # of torch's tensors


def _strided(*_: object) -> torch.layout:
    return torch.strided


def _memory_format(member: object) -> dcp._MEM_FORMAT_ENCODING:
    if type(member) is str:
        return dcp._MEM_FORMAT_ENCODING[member]
    if type(member) is not int:
        raise PickleProblem("a memory format that is no member of its enumeration")
    return dcp._MEM_FORMAT_ENCODING(member)


class _TensorProperties(dcp.TensorProperties):
    """The properties of a tensor as any torch pickles them: five members, and from 2.15 on its strides.

    Only the dtype is kept. The stored tensor has strides of its own.
    """

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, *_ = state
        if further := state[6:]:
            raise ForeignClass(f"properties of a tensor beyond its strides: {shown(further[0])}")


_CLASSES = (
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp.TensorStorageMetadata,
)
_ADMITTED: Mapping[tuple[str, str], Any] = {
    **{(dcp.__name__, found.__name__): found for found in _CLASSES},
    (dcp.__name__, dcp.TensorProperties.__name__): _TensorProperties,
    (dcp.__name__, "_MEM_FORMAT_ENCODING"): _memory_format,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _strided,
}
# Older torch writes the folder's own path, which is not used, as a class of the system that wrote it.
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


def _admitted(module: str, name: str) -> Any:
    """Return a class of DCP's metadata, `torch.Size`, a dtype or a path, and refuse every other name."""
    if module == "torch":
        member = getattr(torch, name, None)
        if member is torch.Size or isinstance(member, torch.dtype):
            return member
    elif module in ("pathlib", "pathlib._local") and name in _PATHS:
        return pathlib.PurePath
    elif (module, name) in _ADMITTED:
        return _ADMITTED[(module, name)]
    raise ForeignClass(f"{module[:200]}.{name[:200]}, which is no part of DCP's metadata")


# Classes of the plans that Megatron stores beside the metadata: not needed, and replaced by a placeholder.
_PLAN_MODULES = ("torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.strategies.torch")
_PLANS = {"BytesIOWriteData", "MCoreSavePlan", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}


class _Discarded:
    """Placeholder for a plan of a save; its content is discarded."""

    def __new__(cls, *_: object, **__: object) -> _Discarded:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _with_plans(module: str, name: str) -> Any:
    """Return what `_admitted` does, and stand-ins for plans of the save and for Megatron-Core's subclass."""
    if module in _PLAN_MODULES and name in _PLANS:
        return _Discarded
    if (module, name) == (_PLAN_MODULES[1], "MCoreMetadata"):
        return dcp.Metadata
    return _admitted(module, name)


def _is_key(key: object) -> bool:
    """Return whether a value is the place of a chunk, whose hash is quickly made."""
    if not isinstance(key, dcp.MetadataIndex) or type(getattr(key, "fqn", None)) is not str:
        return False
    return key.offset is None or isinstance(key.offset, torch.Size)


def read_metadata(file: Path, *, with_plans: bool = False) -> dcp.Metadata:
    """Return the metadata in a file.

    Args:
        with_plans: whether the plans of the save may lie beside it, as Megatron-Core stores them.

    Raises:
        CheckpointError: if it is damaged or holds something else.
        MismatchError: if it names other classes.
    """
    find = _with_plans if with_plans else _admitted
    try:
        data = read_regular(file, limit_bytes=_MOST_METADATA_BYTES)
        described = sum(child.stat().st_size for child in file.parent.iterdir())
        metadata = unpickle(data, find, most=most_reads(described), is_key=_is_key)
    except OSError as error:
        raise failed_read("A DCP metadata file cannot be read", error, where=file) from error
    except ForeignClass as error:
        raise MismatchError(
            "A DCP metadata file holds more than torch's own classes",
            where=file,
            expected="a pickle of torch.distributed.checkpoint.metadata.Metadata and nothing else",
            found=str(error),
            fix="Another program than torch wrote it, or a release of torch that is not known here, or it is damaged. "
            "Where that program can save a Hugging Face folder, import that as `hf`.",
        ) from None
    except PickleProblem as error:
        raise CheckpointError(
            "A DCP metadata file cannot be read",
            where=file,
            expected="a pickle of torch.distributed.checkpoint.metadata.Metadata",
            found=str(error) if data else "an empty file",
            fix="It is damaged, or its writer was killed; import another checkpoint.",
        ) from None
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError("A DCP metadata file holds something else", where=file, found=type(metadata).__name__)
    return metadata


def unsound(metadata: dcp.Metadata) -> Iterable[str]:
    """Yield problems of the metadata: types, and tensors with gaps between their chunks."""
    table, storage = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    if not isinstance(table, dict) or not isinstance(storage, dict):
        yield "the metadata has no tables of values and of where they lie"
        return
    for key, entry in table.items():
        if not isinstance(key, str):
            yield f"a key is no string: {shown(key)}"
        elif isinstance(entry, dcp.TensorStorageMetadata):
            problem = _unsound_tensor(key, entry, storage)
            if problem is not None:
                yield f"{key}: {problem}"
        elif not isinstance(entry, dcp.BytesStorageMetadata):
            yield f"{key}: neither a tensor nor bytes"
        elif dcp.MetadataIndex(key) not in storage:
            yield f"{key}: lies nowhere"


def _unsound_tensor(key: str, entry: dcp.TensorStorageMetadata, storage: dict[Any, Any]) -> str | None:
    size, chunks = getattr(entry, "size", None), getattr(entry, "chunks", None)
    properties = getattr(entry, "properties", None)
    if not (_is_size(size) and isinstance(chunks, list) and isinstance(properties, dcp.TensorProperties)):
        return "no size, chunks or properties"
    if not isinstance(getattr(properties, "dtype", None), torch.dtype):
        return "no dtype"
    filled = dict[tuple[int, ...], tuple[int, ...]]()
    for chunk in chunks:
        offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        if not (isinstance(chunk, dcp.ChunkStorageMetadata) and _is_size(offsets) and _is_size(sizes)):
            return "a chunk without an offset and a size"
        inside = zip(offsets, sizes, size, strict=False)
        if not len(offsets) == len(sizes) == len(size) or any(o + s > n for o, s, n in inside):
            return f"a chunk at {list(offsets)} of shape {list(sizes)} is not inside {list(size)}"
        info = storage.get(dcp.MetadataIndex(key, offsets))
        if info is None:
            return f"the chunk at {list(offsets)} lies nowhere"
        length, expected = getattr(info, "length", None), math.prod(sizes) * properties.dtype.itemsize
        if type(length) is not int or length < expected:
            return f"the chunk at {list(offsets)} lies in {shown(length)} B, and has {expected}"
        filled[tuple(offsets)] = tuple(sizes)
    stored_items = sum(math.prod(sizes) for sizes in filled.values())
    if stored_items != math.prod(size):
        return f"its chunks hold {stored_items} of {math.prod(size)} elements"
    return "its chunks overlap" if _overlap(filled) else None


def _overlap(boxes: dict[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Return whether boxes, sizes by offset, share an element.

    A sweep over the dimension with the most distinct offsets compares only boxes with a common coordinate in it.
    """
    if len(boxes) < 2:
        return False
    dim = max(range(len(next(iter(boxes)))), key=lambda d: len({offset[d] for offset in boxes}))
    open_boxes = list[Box]()
    for box in sorted((Box(*pair) for pair in boxes.items() if math.prod(pair[1])), key=lambda b: b.offset[dim]):
        open_boxes = [neighbor for neighbor in open_boxes if neighbor.end[dim] > box.offset[dim]]
        if any(intersect(box, neighbor).numel for neighbor in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _is_size(value: object) -> TypeGuard[torch.Size]:
    return isinstance(value, torch.Size) and len(value) <= _MOST_DIMENSIONS and all(0 <= n < 2**62 for n in value)
