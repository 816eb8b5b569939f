"""A safetensors header that is not sound is refused by the tensor's name, whatever is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import load, save
from reprise.errors import CheckpointError
from reprise.format import manifest
from reprise.format.layout import TensorKind, header_places
from tests.messages import refused

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
EMPTY = {"dtype": "F32", "shape": [0, 3], "data_offsets": [24, 24]}
B = {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]}
GOOD: dict[str, Any] = {"__metadata__": {"format": "pt"}, "b": B, "none": EMPTY, "a": A}


def parse(table: dict[str, Any], data_bytes: int = 26) -> list[tuple[str, int]]:
    data = bytes(8) + json.dumps(table).encode()
    places = header_places(data, "x", TensorKind.MODEL, len(data) + data_bytes, where="x.safetensors")
    return [(place.spec.name, place.offset - len(data)) for place in places]


def test_tensors_come_in_order_of_the_file() -> None:
    assert parse(GOOD) == [("a", 0), ("none", 24), ("b", 24)]
    assert parse({}, 0) == []


WRONG: dict[str, list[Any]] = {
    "dtype": ["F3", 7],
    "shape": ["23", [2.0, 3], [True, 6], [-2, -3], [2, 4]],
    "data_offsets": [[0], [0, 24, 48], [0, "24"], [-24, 0], [24, 0], [0, 20]],
}


@pytest.mark.parametrize("entry", [3, {}, *({**A, key: value} for key in WRONG for value in WRONG[key])])
def test_an_entry_that_is_malformed_is_refused_by_name(entry: object) -> None:
    with refused(CheckpointError, "x.safetensors", "tensor a"):
        parse({**GOOD, "a": entry})


@pytest.mark.parametrize(
    ("table", "data_bytes"),
    [
        ({"a": A, "c": A}, 48),
        ({"a": A, "c": {**A, "data_offsets": [28, 52]}}, 52),  # a hole
        ({"a": {**A, "data_offsets": [8, 32]}}, 32),
        ({"a": A}, 20),
        ({"a": A}, 28),
        ({}, 4),
    ],
)
def test_tensors_that_do_not_fill_the_file_exactly_are_refused(table: dict[str, Any], data_bytes: int) -> None:
    with refused(CheckpointError, "x.safetensors"):
        parse(table, data_bytes)


def change_manifest(path: Path, change: Callable[[manifest.Manifest], manifest.Manifest]) -> None:
    found = manifest.from_bytes((path / "manifest.json").read_bytes(), where=path)
    (path / "manifest.json").write_bytes(manifest.to_bytes(change(found)))


def test_the_number_of_digests_is_held_against_the_item_size(tmp_path: Path) -> None:
    holder = nn.Module()
    holder.register_buffer("x", torch.zeros(600_000, dtype=torch.float64))  # 4.8 MB, two blocks; one if it were floats
    path = save(tmp_path, holder, iteration=1)
    change_manifest(
        path, lambda m: replace(m, tensors={"x": replace(m.tensors["x"], digests=m.tensors["x"].digests[:8])})
    )
    with refused(CheckpointError, "tensor x"):
        load(path, holder)
