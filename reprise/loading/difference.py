"""Compares two checkpoints, tensor by tensor and field by field, in little memory. Digests are not checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from reprise.format.host_file import missing
from reprise.format.layout import DTYPE_NAMES, Place
from reprise.json_file import Json
from reprise.loading.reader import Checkpoint, not_held, open_tensor_file, read_places

ITEMS = 1 << 20  # compared at once


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The result of comparing one tensor.

    Args:
        found: "equal" if dtype, shape and every bit are; "values"; "dtype" with equal or other values; "shape"; "only
            in A" or "only in B".
        largest: the largest absolute difference of two values, infinite if one is NaN; None if values cannot be
            compared.
        differing: number of values that differ, in value or in bits.
        total: number of values.
        detail: the dtypes or shapes, if they differ.
    """

    name: str
    found: str
    largest: float | None = None
    differing: int = 0
    total: int = 0
    detail: str = ""


def tensor_differences(a: Checkpoint, b: Checkpoint) -> Iterator[TensorDifference]:
    """Compare all tensors of two checkpoints, sorted by name.

    Raises:
        CheckpointError: for a damaged header, an unreadable file, or a piece that lies on another host.
    """
    ours, theirs = read_places(a), read_places(b)
    for checkpoint in (a, b):
        if checkpoint.host is not None:
            for name, numbers in missing(checkpoint.host.writers, [checkpoint.host.held]).items():
                raise not_held(checkpoint, read_places(checkpoint)[name], numbers[0])
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            yield TensorDifference(name, "only in A" if name in ours else "only in B")
        else:
            yield _compare(a, ours[name], b, theirs[name])


def _compare(a: Checkpoint, ours: Place, b: Checkpoint, theirs: Place) -> TensorDifference:
    name, total = ours.spec.name, math.prod(ours.spec.shape)
    if ours.spec.shape != theirs.spec.shape:
        detail = f"{list(ours.spec.shape)} and {list(theirs.spec.shape)}"
        return TensorDifference(name, "shape", total=total, detail=detail)
    is_same_dtype = ours.spec.dtype == theirs.spec.dtype
    largest, differing = 0.0, 0
    for x, y in zip(_values(a, ours), _values(b, theirs), strict=True):
        if is_same_dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        distance = (x.double() - y.double()).abs()
        unlike = _unlike(x, y) if is_same_dtype else _unlike_values(x.double(), y.double())
        distance[~unlike] = 0.0
        differing += int(unlike.sum())
        largest = max(largest, float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    if not is_same_dtype:
        detail = f"{DTYPE_NAMES[ours.spec.dtype]} and {DTYPE_NAMES[theirs.spec.dtype]}"
        return TensorDifference(name, "dtype", largest, differing, total, detail)
    return TensorDifference(name, "values" if differing else "equal", largest, differing, total)


def _unlike(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the positions at which two tensors of one dtype differ in bits."""
    bits = (x.view(torch.uint8) != y.view(torch.uint8)).reshape(x.numel(), -1)
    return bits.any(dim=1)


def _unlike_values(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the positions at which two tensors differ in value; NaN equals NaN."""
    return (x != y) & ~(x.isnan() & y.isnan())


def _values(checkpoint: Checkpoint, place: Place) -> Iterator[torch.Tensor]:
    itemsize = place.spec.dtype.itemsize
    with open_tensor_file(checkpoint.files, checkpoint.path / place.file) as file:
        for lo in range(0, place.spec.total_bytes, ITEMS * itemsize):
            data = bytearray(min(ITEMS * itemsize, place.spec.total_bytes - lo))
            file.read(memoryview(data), place.offset + lo)
            yield torch.frombuffer(data, dtype=torch.uint8).view(place.spec.dtype)


_ABSENT = "(absent)"


def state_differences(a: Json, b: Json, *, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the dotted names of fields that differ, with both values."""
    for key in sorted(a.keys() | b.keys()):
        ours, theirs = a.get(key, _ABSENT), b.get(key, _ABSENT)
        name = f"{path}{key}"
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from state_differences(ours, theirs, path=f"{name}.")
        elif ours != theirs:
            yield name, ours, theirs
