"""Compares two checkpoints, tensor by tensor and field by field, in little memory. Digests are not checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from reprise.format.layout import Place
from reprise.loading.reader import Checkpoint, open_tensor_file, read_places
from reprise.management.paths import open_newest
from reprise.management.progress import ProgressCallback, ignore_progress
from reprise.storage.json_file import Json
from reprise.stores.checkpoint_files import part_of_host
from reprise.tensors.dtypes import torch_dtype

ITEMS = 1 << 20  # compared at a time


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The result of comparing a tensor.

    Args:
        result: "equal" if dtype, shape and every bit are equal; "values"; "dtype", with equal or other values; "shape";
            "only in A" or "only in B".
        largest: The largest absolute difference between two values. Infinite if either is NaN, None if values cannot
            be compared.
        differing: How many values differ in value or in bits.
        total: How many values the tensor has.
        detail: The dtypes or shapes, if they differ.
    """

    name: str
    result: str
    largest: float | None = None
    differing: int = 0
    total: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field that differs between two state files: its dotted name and both values, `(absent)` if missing."""

    name: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """The result of comparing two checkpoints.

    Args:
        tensors: All tensors in either checkpoint, sorted by name, including equal ones.
        state: The fields that differ between their state files.
    """

    tensors: tuple[TensorDifference, ...]
    state: tuple[FieldDifference, ...]

    @property
    def equal_tensors(self) -> int:
        """Count the tensors that are equal bit for bit."""
        return sum(tensor.result == "equal" for tensor in self.tensors)

    @property
    def is_empty(self) -> bool:
        """Return whether the checkpoints are equal."""
        return self.equal_tensors == len(self.tensors) and not self.state


def diff(a: str | Path, b: str | Path, *, progress: ProgressCallback = ignore_progress) -> CheckpointDifference:
    """Compare two checkpoints with any file layouts and topologies. Tensor digests are not checked.

    Args:
        a: A checkpoint folder, or a run's folder for its newest checkpoint.
        b: The other checkpoint, given likewise.
        progress: Called with an empty name, the count of compared tensors, and the total.

    Raises:
        CheckpointError: There is no checkpoint, its JSON files or headers are damaged, or a piece lies on another host.
        UnreadableError: A file cannot be read at the moment.
    """
    first, second = (open_newest(path) for path in (a, b))
    for checkpoint in (first, second):
        if not checkpoint.is_whole:
            raise part_of_host(checkpoint.path)
    places_a, places_b, tensors = read_places(first), read_places(second), list[TensorDifference]()
    names = sorted(places_a.keys() | places_b.keys())
    progress("", 0, len(names))
    for name in names:
        if name in places_a and name in places_b:
            tensors.append(_compare(first, places_a[name], second, places_b[name]))
        else:
            tensors.append(TensorDifference(name, "only in A" if name in places_a else "only in B"))
        progress("", len(tensors), len(names))
    return CheckpointDifference(tuple(tensors), tuple(_state_differences(first.state, second.state)))


def _compare(a: Checkpoint, place_a: Place, b: Checkpoint, place_b: Place) -> TensorDifference:
    spec, spec_b = place_a.spec, place_b.spec
    total, is_same_dtype = math.prod(spec.shape), spec.dtype == spec_b.dtype
    if spec.shape != spec_b.shape:
        return TensorDifference(spec.name, "shape", total=total, detail=f"{list(spec.shape)} and {list(spec_b.shape)}")
    largest, differing = 0.0, 0
    for x, y in zip(_values(a, place_a), _values(b, place_b), strict=True):
        bits = x.view(torch.uint8), y.view(torch.uint8)
        if is_same_dtype and torch.equal(*bits):
            continue
        x, y = x.double(), y.double()
        unlike = (x != y) & ~(x.isnan() & y.isnan())
        if is_same_dtype:
            unlike = torch.ne(*bits).reshape(x.numel(), -1).any(dim=1)
        distance = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        differing += int(unlike.sum())
        largest = max(largest, float(distance.where(unlike, 0.0).max()))
    detail = "" if is_same_dtype else f"{spec.dtype.name} and {spec_b.dtype.name}"
    result = "dtype" if detail else "values" if differing else "equal"
    return TensorDifference(spec.name, result, largest, differing, total, detail)


def _values(checkpoint: Checkpoint, place: Place) -> Iterator[torch.Tensor]:
    itemsize = place.spec.dtype.itemsize
    with open_tensor_file(checkpoint.files, checkpoint.path / place.file) as file:
        for lo in range(0, place.spec.total_bytes, ITEMS * itemsize):
            data = bytearray(min(ITEMS * itemsize, place.spec.total_bytes - lo))
            file.read(memoryview(data), place.offset + lo)
            yield torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype(place.spec.dtype))


_ABSENT = "(absent)"


def _state_differences(a: Json, b: Json, path: str = "") -> Iterator[FieldDifference]:
    for key in sorted(a.keys() | b.keys()):
        value_a, value_b = a.get(key, _ABSENT), b.get(key, _ABSENT)
        if isinstance(value_a, dict) and isinstance(value_b, dict):
            yield from _state_differences(value_a, value_b, f"{path}{key}.")
        elif value_a != value_b:
            yield FieldDifference(f"{path}{key}", value_a, value_b)
