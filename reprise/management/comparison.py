"""Compares two checkpoints, tensor by tensor and field by field, in little memory. Digests are not checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from reprise.format.layout import Place
from reprise.loading.reader import Checkpoint, not_held, open_tensor_file, read_places
from reprise.management.paths import open_newest
from reprise.management.progress import ProgressCallback, ignore_progress
from reprise.storage.json_file import Json
from reprise.tensors.dtypes import torch_dtype

ITEMS = 1 << 20  # compared at once


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The result of comparing a tensor.

    Args:
        result: "equal" if dtype, shape and every bit are; "values"; "dtype" with equal or other values; "shape"; "only
            in A" or "only in B".
        largest: the largest absolute difference of two values, infinite if either is NaN; None if values cannot be
            compared.
        differing: number of values with a difference in value or in bits.
        total: number of values.
        detail: the dtypes or shapes, if they differ.
    """

    name: str
    result: str
    largest: float | None = None
    differing: int = 0
    total: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field with a difference between two state files, by its dotted name, and both values; `(absent)` if missing."""

    name: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """The result of comparing two checkpoints.

    Args:
        tensors: of either checkpoint, sorted by name, the equal ones included.
        state: the fields with a difference between their state files.
    """

    tensors: tuple[TensorDifference, ...]
    state: tuple[FieldDifference, ...]

    @property
    def equal_tensors(self) -> int:
        """Return the number of tensors equal bit for bit."""
        return sum(tensor.result == "equal" for tensor in self.tensors)

    @property
    def is_empty(self) -> bool:
        """Return whether the checkpoints are equal."""
        return self.equal_tensors == len(self.tensors) and not self.state


def diff(a: str | Path, b: str | Path, *, progress: ProgressCallback = ignore_progress) -> CheckpointDifference:
    """Compare two checkpoints, of any file layouts and topologies.

    Args:
        a: the folder of a checkpoint, or of a run for its newest.
        b: the same.
        progress: is called with an empty name, the number of compared tensors, and of all.

    Raises:
        CheckpointError: if there is no checkpoint, its JSON files or headers are damaged, or a piece lies on another
            host. Digests of tensors are not checked.
        UnreadableError: if a file cannot be read at the moment.
    """
    first, second = (open_newest(path) for path in (a, b))
    total, tensors = len(first.manifest.tensors.keys() | second.manifest.tensors.keys()), list[TensorDifference]()
    progress("", 0, total)
    for difference in tensor_differences(first, second):
        tensors.append(difference)
        progress("", len(tensors), total)
    state = (FieldDifference(*fields) for fields in state_differences(first.state, second.state))
    return CheckpointDifference(tuple(tensors), tuple(state))


def tensor_differences(a: Checkpoint, b: Checkpoint) -> Iterator[TensorDifference]:
    """Compare all tensors of two checkpoints, sorted by name.

    Raises:
        CheckpointError: for a damaged header, an unreadable file, or a piece on another host.
    """
    places_a, places_b = read_places(a), read_places(b)
    for checkpoint in (a, b):
        if checkpoint.host is not None:
            for name, numbers in checkpoint.host.missing.items():
                raise not_held(checkpoint, read_places(checkpoint)[name], numbers[0])
    for name in sorted(places_a.keys() | places_b.keys()):
        if name not in places_b or name not in places_a:
            yield TensorDifference(name, "only in A" if name in places_a else "only in B")
        else:
            yield _compare(a, places_a[name], b, places_b[name])


def _compare(a: Checkpoint, place_a: Place, b: Checkpoint, place_b: Place) -> TensorDifference:
    name, total = place_a.spec.name, math.prod(place_a.spec.shape)
    if place_a.spec.shape != place_b.spec.shape:
        detail = f"{list(place_a.spec.shape)} and {list(place_b.spec.shape)}"
        return TensorDifference(name, "shape", total=total, detail=detail)
    is_same_dtype = place_a.spec.dtype == place_b.spec.dtype
    largest, differing = 0.0, 0
    for x, y in zip(_values(a, place_a), _values(b, place_b), strict=True):
        bits = x.view(torch.uint8), y.view(torch.uint8)
        if is_same_dtype and torch.equal(*bits):
            continue
        x, y = x.double(), y.double()
        if is_same_dtype:
            unlike = torch.ne(*bits).reshape(x.numel(), -1).any(dim=1)
        else:
            unlike = (x != y) & ~(x.isnan() & y.isnan())
        distance = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        differing += int(unlike.sum())
        largest = max(largest, float(distance.where(unlike, 0.0).max()))
    detail = "" if is_same_dtype else f"{place_a.spec.dtype.name} and {place_b.spec.dtype.name}"
    result = "dtype" if detail else "values" if differing else "equal"
    return TensorDifference(name, result, largest, differing, total, detail)


def _values(checkpoint: Checkpoint, place: Place) -> Iterator[torch.Tensor]:
    itemsize = place.spec.dtype.itemsize
    with open_tensor_file(checkpoint.files, checkpoint.path / place.file) as file:
        for lo in range(0, place.spec.total_bytes, ITEMS * itemsize):
            data = bytearray(min(ITEMS * itemsize, place.spec.total_bytes - lo))
            file.read(memoryview(data), place.offset + lo)
            yield torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype(place.spec.dtype))


_ABSENT = "(absent)"


def state_differences(a: Json, b: Json, *, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the dotted names of different fields, with both values."""
    for key in sorted(a.keys() | b.keys()):
        value_a, value_b = a.get(key, _ABSENT), b.get(key, _ABSENT)
        name = f"{path}{key}"
        if isinstance(value_a, dict) and isinstance(value_b, dict):
            yield from state_differences(value_a, value_b, path=f"{name}.")
        elif value_a != value_b:
            yield name, value_a, value_b
