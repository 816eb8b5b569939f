"""Values of Python in `trainer_state.json`: equal in value, type and order after a load, or refused by their key."""

from __future__ import annotations

import io
import json
import math
import random
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from reprise import load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError
from reprise.format.manifest import Manifest
from reprise.loading.reader import Checkpoint
from reprise.nested.documents import join_sections, read_state
from reprise.nested.typed_values import MALFORMED, ByLeaf, decode, decode_number, encode, encode_number
from reprise.storage.files import Files
from tests.messages import refused


def read_to(position: int, buffer: io.BytesIO) -> io.BytesIO:
    buffer.seek(position)
    return buffer


VALUES: list[object] = [
    {3: 0.5, None: 1, True: 2, "a": 3, (1, "b"): 4, 2.5: 5},
    {"$type": "tuple", "value": [1]},
    [{"$type": 3}, [[]], {}],
    (1, (2.5, None), [3]),
    (),
    {1, 2, "a"},
    frozenset({(1, 2)}),
    set(),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    torch.__version__,
    Counter({5: 2, 3: 1}),
    OrderedDict([("b", 1), ("a", OrderedDict())]),
    [Counter("abb"), OrderedDict()],
    math.inf,
    -math.inf,
    math.nan,
    -0.0,
    5e-324,
    complex(1.5, -math.inf),
    1 << 2000,
    "\ud800 half",
    {"\ud800": 1},
    b"\x00\xff",
    bytearray(b"ab"),
    read_to(2, io.BytesIO(b"\x00abc")),
    np.float32(1.5),
    np.array([[1, 2]], dtype=np.uint8),
    np.arange(3, dtype=">f4"),
    np.array(["ab", ""]),
    np.array([b"ab", b"c"]),
    np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    np.array([5, -1], dtype="timedelta64[25ns]"),
    np.zeros((0, 2), dtype="U3"),
    np.str_("ab"),
    np.str_(""),
    np.datetime64("2020-01-01T00:00"),
    random.Random(3).getstate(),
]


def typed(value: Any) -> Any:
    """Return a value as text and types, in order; a set in the order of its texts."""
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(typed, value)))
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(member)) for key, member in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(member) for member in value]
    if isinstance(value, io.BytesIO):
        return type(value), value.getvalue(), value.tell()
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.shape, value.tobytes()
    return type(value), repr(value)


def test_a_value_comes_back_in_value_type_and_order(tmp_path: Path) -> None:
    named = {f"own{number}": value for number, value in enumerate(VALUES)}
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": model.parameters(), **named}], lr=0.1)
    path = save(tmp_path / "a", model, optimizer, iteration=1, state={"a": named, "in": {"b": VALUES}})
    again = torch.optim.SGD([{"params": model.parameters(), **dict.fromkeys(named)}], lr=0.1)
    found = load(path, model, again)
    path = save_state_dict(tmp_path / "b", {"a": VALUES, "b": named}, iteration=1)
    state: dict[str, Any] = {"a": [], "b": dict(named)}
    load_state_dict(path, state)
    for number, (name, value) in enumerate(named.items()):
        for other in (found["a"][name], found["in"]["b"][number], again.param_groups[0][name]):
            assert typed(other) == typed(value)
        assert typed(state["a"][number]) == typed(state["b"][name]) == typed(value)


def stored(**section: Any) -> Checkpoint:
    """Return a checkpoint with this section in its state file."""
    state = {"state_dict": {"values": {}, "groups": {}, **section}}
    return Checkpoint(Path(), Files(), Manifest("", {}, {}, {}), state)


def test_classes_of_earlier_versions_are_read() -> None:
    values = {"/a/b": 1, "/a/c/d": 2}
    for classes in ({"/a": "OrderedDict"}, {"/a": "OrderedDict", "/a/c": "Counter"}):
        found = read_state(stored(values=values, classes=classes))
        kinds = [type(found.root["a"]), type(found.root["a"]["c"])]
        assert kinds == [OrderedDict, Counter if "/a/c" in classes else ByLeaf]


@pytest.mark.parametrize("values", [{"epoch": 1}, {"": 1}, {"/a": 1, "/a/b": 2}, [1]], ids=repr)
def test_a_state_file_that_contradicts_itself_is_refused(values: Any) -> None:
    with refused(CheckpointError, "trainer_state.json"):
        read_state(stored(values=values))


def test_plain_values_have_no_tag() -> None:
    plain = {"a": [1, 2.5, "é", None, True, {"b": []}], "c": {}}
    assert encode(plain, ("x",)) == plain
    assert encode_number((0.9, 0.999), ("x",)) == [0.9, 0.999]
    assert decode_number([0.9, 0.999]) == (0.9, 0.999)
    assert "$type" in json.dumps([encode_number([0.9], ("x",)), encode_number({}, ("x",))])


@pytest.mark.parametrize(
    "value",
    [
        {"$type": "set"},
        {"$type": "later", "value": 1},
        {"$type": "tuple", "value": 3},
        {"$type": "list", "value": "ab"},
        {"$type": "set", "value": {"a": 1}},
        {"$type": "torch.dtype", "value": "load"},
        {"$type": "numpy.ndarray", "value": ["|O", [1], "00"]},
        {"$type": "numpy.ndarray", "value": ["<f8", [2], "00"]},
        {"$type": "dict", "value": [[1]]},
        {"$type": "float", "value": "1e999"},
        {"$type": "complex", "value": ["a", 1]},
    ],
)
def test_a_malformed_tag_is_seen(value: object) -> None:
    with pytest.raises(MALFORMED):
        decode([value])


@pytest.mark.parametrize("other", [(1,), Counter({"a": 1})], ids=["tuple", "Counter"])
def test_ranks_may_not_differ_in_the_type_of_a_value(other: Any) -> None:
    values = [encode(value, ()) for value in ([1] if type(other) is tuple else {"a": 1}, other)]
    with refused(CheckpointError, "/a", "rank 0", "rank 1"):
        join_sections({rank: {"values": {"/a": value}} for rank, value in enumerate(values)})


def test_a_value_is_not_compared_with_its_dtype():
    by_rank = {
        r: {"values": {"/x": {}, "/r": 0}, "dtypes": {"/x": "complex64"}, "classes": {"/r": "dict"}} for r in (0, 1)
    }
    assert join_sections(by_rank) == by_rank[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f4")]), ["[('a', '<i4')"]),
        (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), ["MaskedArray", "mask"]),
        (np.array([1.0]).view(np.recarray), ["recarray"]),
        (deque([1]), ["deque"]),
        (torch.strided, ["layout", "str(value)"]),
    ],
)
def test_other_arrays_are_refused_with_their_dtype(tmp_path: Path, value: object, words: list[str]) -> None:
    with refused(CheckpointError, "(/a/b/0)", *words):
        save(tmp_path, nn.Linear(1, 1), iteration=1, state={"a": {"b": [value]}})


def test_a_memory_map_comes_back_as_an_array(tmp_path: Path) -> None:
    values = np.memmap(tmp_path / "values", np.float32, "w+", shape=(3,))
    values[:] = 7
    load_state_dict(save_state_dict(tmp_path / "run", {"v": values}, iteration=1), again := {"v": None})
    assert typed(again["v"]) == typed(np.full(3, 7, np.float32))
