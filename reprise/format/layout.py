"""Every tensor's position on disk: a pure function of names, shapes, dtypes and `file_bytes`.

Every rank computes the same layout, so planning a save needs no communication.

The files are safetensors (https://github.com/huggingface/safetensors#format): the header length as eight little-endian
bytes, a JSON header, then the data. Header padding aligns the data to a page boundary.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from reprise.errors import CheckpointError
from reprise.format.box import Box, Image, image
from reprise.format.dtype import StoredDtype
from reprise.format.names import ADAPTERS
from reprise.storage import json_file
from reprise.storage.json_file import integer

PAGE_BYTES = 4096
DEFAULT_FILE_BYTES = 2 << 30

METADATA = "__metadata__"
MOST_DIMENSIONS = 31  # 32, numpy 1's limit, less one for an item's bytes
MOST_ELEMENTS = 2**63 - 1  # torch's largest size


class TensorKind(Enum):
    """A tensor's file family: weights, adapters, optimizer state, or the rest of a state dict."""

    MODEL = "model"
    ADAPTER = "adapter"
    OPTIMIZER = "optimizer"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A logical tensor as stored on disk.

    Args:
        shape: The shape in the header.
        view: Another shape for the same C-ordered bytes. Live parameters' boxes are in its coordinates.
    """

    kind: TensorKind
    name: str
    shape: tuple[int, ...]
    dtype: StoredDtype
    view: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def image(self, box: Box) -> Image:
        """Return the image of a box in `view` coordinates."""
        return image(box, self.view, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's position: `file` is relative to the checkpoint folder, `offset` counts from the file start."""

    spec: TensorSpec
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A safetensors file: `header` holds every byte before the data, `total_bytes` is the file size."""

    name: str
    header: bytes
    total_bytes: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint's tensor files, their total size, and each tensor's place by name."""

    files: tuple[FileLayout, ...]
    total_bytes: int
    places: dict[str, Place]


def build_layout(specs: Sequence[TensorSpec], *, file_bytes: int = DEFAULT_FILE_BYTES) -> Layout:
    """Lay out `specs`, given in model order: larger items first, no holes, at most `file_bytes` data bytes per file.

    A tensor is never split across files. A tensor larger than `file_bytes` gets its own file.

    Raises:
        CheckpointError: A name is duplicate or reserved by safetensors, or a tensor has too many dimensions.
    """
    refuse_unstorable(specs)
    files: list[FileLayout] = []
    for kind in TensorKind:
        # PEFT opens one file.
        room = sum(s.total_bytes for s in specs) if kind is TensorKind.ADAPTER else file_bytes
        groups = _fill([s for s in specs if s.kind is kind], room)
        files += [_lay_file(file_name(kind, i, len(groups)), group) for i, group in enumerate(groups)]
    places = {place.spec.name: place for file in files for place in file.places}
    return Layout(tuple(files), sum(file.total_bytes for file in files), places)


def file_name(kind: TensorKind, index: int, count: int) -> str:
    """Return the name for file `index` among `count`, numbered like transformers' shards."""
    if kind is TensorKind.ADAPTER:
        return ADAPTERS
    if kind is TensorKind.MODEL and count == 1:
        return "model.safetensors"
    stem = "model" if kind is TensorKind.MODEL else f"{kind.value}/{kind.value}"
    return f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def kind_of_file(name: str) -> TensorKind:
    """Return a tensor file's family, by its name in the checkpoint."""
    if name == ADAPTERS:
        return TensorKind.ADAPTER
    folder = name.split("/")[0]
    return next((kind for kind in (TensorKind.OPTIMIZER, TensorKind.EXTRA) if folder == kind.value), TensorKind.MODEL)


def model_index(layout: Layout) -> dict[str, object]:
    """Return `model.safetensors.index.json`, which tells globbing loaders the exact weight files."""
    weights = [place for place in layout.places.values() if place.spec.kind is TensorKind.MODEL]
    return {
        "metadata": {"total_size": sum(place.spec.total_bytes for place in weights)},
        "weight_map": {place.spec.name: place.file for place in sorted(weights, key=lambda p: p.spec.name)},
    }


def refuse_unstorable(specs: Iterable[TensorSpec]) -> None:
    """Refuse duplicate or reserved tensor names, and too many dimensions.

    Raises:
        CheckpointError: Names the first such tensor.
    """
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise CheckpointError("Two tensors have the same name", where=spec.name, fix="Rename one of them.")
        seen.add(spec.name)
        if spec.name == METADATA:
            raise CheckpointError("A tensor has a name that safetensors reserves", where=spec.name)
        if max(len(spec.shape), len(spec.view)) > MOST_DIMENSIONS:
            raise CheckpointError(
                "A tensor has too many dimensions",
                where=spec.name,
                expected=f"at most {MOST_DIMENSIONS}",
                found=max(len(spec.shape), len(spec.view)),
            )


def _fill(specs: Sequence[TensorSpec], file_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = []
    room = 0
    for spec in sorted(specs, key=lambda s: -s.dtype.itemsize):  # stable: model order within an item size
        if not groups or spec.total_bytes > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(spec)
        room -= spec.total_bytes
    return groups


def _lay_file(name: str, specs: Sequence[TensorSpec]) -> FileLayout:
    table: dict[str, object] = {METADATA: {"format": "pt"}}
    offsets = [0, *itertools.accumulate(spec.total_bytes for spec in specs)]
    for spec, ends in zip(specs, itertools.pairwise(offsets), strict=True):
        table[spec.name] = {"dtype": spec.dtype.name, "shape": list(spec.shape), "data_offsets": list(ends)}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
    header = length.to_bytes(8, "little") + text.ljust(length)
    places = tuple(Place(spec, name, len(header) + at) for spec, at in zip(specs, offsets, strict=False))
    return FileLayout(name, header, len(header) + offsets[-1], places)


def integers(values: Iterable[int], *, most: int = MOST_ELEMENTS) -> tuple[int, ...]:
    """Return a JSON list's integers from 0 to `most`. They are checked together, since some lists have millions.

    Raises:
        TypeError: It is not a list.
        ValueError: Names the first wrong value.
    """
    numbers = tuple(values)
    if numbers and not ({*map(type, numbers)} == {int} and 0 <= min(numbers) <= max(numbers) <= most):
        for number in numbers:
            integer(number, most=most)
    return numbers


def is_shape(sizes: Sequence[int]) -> bool:
    """Return whether a tensor can have these `integers`: neither too many dimensions nor too many elements."""
    return len(sizes) <= MOST_DIMENSIONS and math.prod(sizes) <= MOST_ELEMENTS


def header_places(data: bytes, name: str, kind: TensorKind, total_bytes: int, *, where: object) -> list[Place]:
    """Return every tensor's place from a safetensors header, in file order.

    Args:
        data: The header from `read_header`.
        name: The file name in its folder.
        total_bytes: The file size.

    Raises:
        CheckpointError: Names the first tensor with a malformed entry, or with a gap or overlap before it. Or the
            data does not end with the last tensor.
    """
    table, places, position = json_file.parse(data[8:], where=where), list[Place](), len(data)
    entries = [
        _parse_entry(tensor, entry, kind, where=f"{where}, tensor {tensor}")
        for tensor, entry in table.items()
        if tensor != METADATA
    ]
    for spec, offset in sorted(entries, key=lambda item: (item[1], item[0].total_bytes)):
        if offset != position - len(data):
            raise _malformed(f"{where}, tensor {spec.name}", f"a start at byte {position - len(data)}", offset)
        places.append(Place(spec, name, position))
        position += spec.total_bytes
    if position != total_bytes:
        expected = f"{total_bytes - len(data)} B of data, as the file has"
        raise _malformed(where, expected, position - len(data))
    return places


def _parse_entry(name: str, entry: Any, kind: TensorKind, *, where: str) -> tuple[TensorSpec, int]:
    try:
        dtype, shape = StoredDtype[entry["dtype"]], integers(entry["shape"])
        start, end = integers(entry["data_offsets"])
    except (LookupError, TypeError, ValueError) as error:
        expected = f"a dtype of {', '.join(StoredDtype.__members__)}, a shape and two data_offsets of natural numbers"
        raise _malformed(where, expected, entry) from error
    spec = TensorSpec(kind, name, shape, dtype, shape)
    if not is_shape(shape) or end - start != spec.total_bytes:
        expected = f"at most {MOST_DIMENSIONS} dimensions and 2^63 - 1 elements, and their bytes between data_offsets"
        raise _malformed(where, expected, entry)
    return spec, start


def _malformed(where: object, expected: str, actual: object) -> CheckpointError:
    return CheckpointError("A safetensors header is malformed", where=where, expected=expected, found=repr(actual))
