"""Parses and validates the header of a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from reprise import json_file
from reprise.errors import CheckpointError
from reprise.format.layout import DTYPES, METADATA, MOST_DIMENSIONS, Place, TensorKind, TensorSpec
from reprise.format.manifest import is_shape
from reprise.json_file import Json


def header_places(data: bytes, name: str, kind: TensorKind, total_bytes: int, *, where: object) -> list[Place]:
    """Return the place of every tensor in a safetensors header.

    Args:
        data: the header, as `read_header` returns it.
        name: the name of the file in its folder.
        total_bytes: the size of the file.

    Raises:
        CheckpointError: if the header is malformed, or the file is longer or shorter than its tensors.
    """
    table, length = json_file.parse(data[8:], where=where), len(data) - 8
    specs = parse(table, kind, data_bytes=total_bytes - 8 - length, where=where)
    return [Place(spec, name, 8 + length + offset) for spec, offset in specs]


def parse(table: Json, kind: TensorKind, *, data_bytes: int, where: object) -> list[tuple[TensorSpec, int]]:
    """Return every tensor of a header in file order, with its offset in the file's `data_bytes` of data.

    Raises:
        CheckpointError: naming the first tensor with a malformed entry, or with a gap or overlap before it; or if the
            data does not end with the last tensor.
    """
    specs = []
    for name, entry in table.items():
        if name != METADATA:
            specs.append(_parse_entry(name, entry, kind, where=f"{where}, tensor {name}"))
    specs.sort(key=lambda item: (item[1], item[1] + item[0].total_bytes))
    position = 0
    for spec, offset in specs:
        if offset != position:
            raise _malformed(f"{where}, tensor {spec.name}", f"a start at byte {position}", offset)
        position += spec.total_bytes
    if position != data_bytes:
        raise _malformed(where, f"{data_bytes} B of data, as the file has", position)
    return specs


def _parse_entry(name: str, entry: object, kind: TensorKind, *, where: str) -> tuple[TensorSpec, int]:
    if not isinstance(entry, Mapping):
        raise _malformed(where, "an object", entry)
    shape, offsets, dtype = entry.get("shape"), entry.get("data_offsets"), entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _malformed(where, "a dtype of " + ", ".join(sorted(DTYPES)), dtype)
    if not _are_naturals(shape):
        raise _malformed(where, "a shape of natural numbers", shape)
    if not is_shape(shape):
        raise _malformed(where, f"a shape of at most {MOST_DIMENSIONS} dimensions and 2^63 - 1 elements", shape)
    if not _are_naturals(offsets) or len(offsets) != 2:
        raise _malformed(where, "two data_offsets", offsets)
    spec = TensorSpec(kind, name, tuple(shape), DTYPES[dtype], tuple(shape))
    if offsets[1] - offsets[0] != spec.total_bytes:
        raise _malformed(where, f"{spec.total_bytes} B for {dtype} of shape {shape}", f"data_offsets {offsets}")
    return spec, offsets[0]


def _are_naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _malformed(where: object, expected: str, actual: object) -> CheckpointError:
    return CheckpointError("A safetensors header is malformed", where=where, expected=expected, found=repr(actual))
