"""Values of Python in `trainer_state.json`: equal in value, type and order after a load, or refused by their key."""

from __future__ import annotations

import io
import json
import math
import random
from collections import Counter, OrderedDict, deque
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from reprise import load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError
from reprise.nested.typed_values import decode, decode_number, encode, encode_number

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
    -0.0,
    5e-324,
    complex(1.5, -math.inf),
    1 << 2000,
    -(1 << 62),
    True,
    "\ud800 half",
    {"\ud800": 1},
    b"\x00\xff",
    bytearray(b"ab"),
    np.float32(1.5),
    np.int64(3),
    np.array([[1, 2]], dtype=np.uint8),
    np.arange(3, dtype=">f4"),
    np.array(["ab", ""]),
    np.array([b"ab", b"c"]),
    np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    np.array([5, -1], dtype="timedelta64[25ns]"),
    np.zeros((0, 2), dtype="U3"),
    np.str_("ab"),
    np.str_(""),
    np.bytes_(b""),
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
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.shape, value.tobytes()
    return type(value), repr(value)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_in_value_type_and_order(tmp_path: Path, value: object) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "own": value}], lr=0.1)
    path = save(tmp_path / "a", model, optimizer, iteration=1, state={"a": value, "in": {"b": [value]}})
    again = torch.optim.SGD([{"params": model.parameters(), "own": None}], lr=0.1)
    found = load(path, model, again)
    assert typed(found["a"]) == typed(value)
    assert typed(found["in"]) == typed({"b": [value]})
    assert typed(again.param_groups[0]["own"]) == typed(value)
    path = save_state_dict(tmp_path / "b", {"a": [value], "b": {"c": value}}, iteration=1)
    state: dict[str, Any] = {"a": [], "b": {"c": value}}
    load_state_dict(path, state)
    assert typed(state) == typed({"a": [value], "b": {"c": value}})


def test_an_array_mapped_from_a_file_comes_back_in_memory(tmp_path: Path) -> None:
    values = np.memmap(tmp_path / "values", np.float32, "w+", shape=(3,))
    values[:] = 7
    path = save_state_dict(tmp_path / "run", {"a": {"values": values}}, iteration=1)
    state: dict[str, Any] = {"a": {"values": np.zeros(1, np.float32)}}
    load_state_dict(path, state)
    assert type(state["a"]["values"]) is np.ndarray
    assert np.array_equal(state["a"]["values"], values)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (
            np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f4")]),
            r"ndarray of dtype \[\('a', '<i4'\), .*Pass .* each field",
        ),
        (np.array([1, "a"], dtype=object), r"ndarray of dtype object.*value\.tolist\(\)"),
        (np.void(b"abc"), r"void of dtype \|V3"),
        (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), r"MaskedArray of dtype float64.*a mask"),
        (np.array([1.0]).view(np.recarray), r"recarray of dtype"),
    ],
)
def test_other_arrays_are_refused_with_their_dtype(tmp_path: Path, value: object, found: str) -> None:
    with pytest.raises(CheckpointError, match=rf"numpy.*\(/a/b/0\).*{found}"):
        save(tmp_path, nn.Linear(1, 1), iteration=1, state={"a": {"b": [value]}})


@pytest.mark.parametrize("value", [Decimal(1), Path("a"), deque([1]), date(2020, 1, 1), torch.strided])
def test_other_objects_are_refused_with_a_cure(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"\(/a/b\).*found an object of {type(value).__name__}\..*str\(value\)"):
        save(tmp_path, nn.Linear(1, 1), iteration=1, state={"a": {"b": value}})


def test_nan_comes_back(tmp_path: Path) -> None:
    state = {"best": math.nan}
    load_state_dict(save_state_dict(tmp_path, state, iteration=1), again := {"best": 0.0})
    assert math.isnan(again["best"])


def test_a_buffer_comes_back_with_its_position(tmp_path: Path) -> None:
    buffer = io.BytesIO(b"\x00abc")
    buffer.seek(2)
    load_state_dict(save_state_dict(tmp_path, {"b": buffer}, iteration=1), again := {"b": io.BytesIO()})
    assert (again["b"].read(), again["b"].getvalue()) == (b"bc", b"\x00abc")


def test_plain_values_have_no_tag() -> None:
    plain = {"a": [1, 2.5, "é", None, True, {"b": []}], "c": {}}
    assert encode(plain, ("x",)) == plain
    assert encode_number((0.9, 0.999), ("x",)) == [0.9, 0.999]
    assert decode_number([0.9, 0.999]) == (0.9, 0.999)
    assert "$type" in json.dumps([encode_number([0.9], ("x",)), encode_number({}, ("x",))])


def test_a_value_is_stored_as_it_was_at_the_call() -> None:
    losses = [0.5]
    stored = encode({"losses": losses}, ())
    losses.append(0.4)
    assert stored == {"losses": [0.5]}


@pytest.mark.parametrize(
    "value",
    [
        {"$type": "set"},
        {"$type": "later", "value": 1},
        {"$type": ["tuple"], "value": []},
        {"$type": "tuple", "value": 3},
        {"$type": "torch.dtype", "value": "load"},
        {"$type": "torch.device", "value": "nowhere"},
        {"$type": "numpy.ndarray", "value": ["|O", [1], "00"]},
        {"$type": "numpy.ndarray", "value": ["<f8", [2], "00"]},
        {"$type": "numpy.ndarray", "value": ["<f8", [1], "00" * 16]},
        {"$type": "numpy.ndarray", "value": ["|V1", [1], "00"]},
        {"$type": "set", "value": [[1]]},
        {"$type": "dict", "value": [[1]]},
        {"$type": "float", "value": "1e999"},
        {"$type": "complex", "value": ["a", 1]},
    ],
)
def test_a_malformed_tag_raises_value_error(value: object) -> None:
    with pytest.raises(ValueError, match="is no type of a value"):
        decode([value])


@pytest.mark.parametrize("value", [{}, {"a": 1}, [[1]], [None]])
def test_a_group_s_value_is_an_array_of_numbers_or_tagged(value: object) -> None:
    with pytest.raises(ValueError, match="no value of a parameter group"):
        decode_number(value)


def schedulers(optimizer: torch.optim.Optimizer) -> list[lr_scheduler.LRScheduler]:
    parts = [lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.1), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return [
        lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.1),
        lr_scheduler.SequentialLR(optimizer, parts, milestones=[3]),
        lr_scheduler.ChainedScheduler(parts),
        lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lr_scheduler.ReduceLROnPlateau(optimizer),  # type: ignore[list-item]
        lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lr_scheduler.PolynomialLR(optimizer, 5),
        lr_scheduler.CyclicLR(optimizer, 0.1, 0.5),
    ]


@pytest.mark.parametrize("number", range(9))
def test_the_state_of_a_scheduler_is_carried(tmp_path: Path, number: int) -> None:
    model = nn.Linear(1, 1)
    scheduler, again = (schedulers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))[number] for _ in "ab")
    for _ in range(3):
        scheduler.optimizer.step()
        scheduler.step(*([1.0] if number == 5 else []))
    expected = typed(scheduler.state_dict())
    path = save(tmp_path, model, iteration=1, state={"scheduler": scheduler.state_dict()})
    assert typed(load(path, model)["scheduler"]) == expected
    state = {"scheduler": again.state_dict()}
    load_state_dict(path, state)
    assert typed(state["scheduler"]) == expected


def test_ranks_may_not_differ_in_the_type_of_a_value() -> None:
    from reprise.nested.documents import NestedValues, join_values

    with pytest.raises(CheckpointError, match=r"different values \(/a\).*tuple"):
        join_values({0: NestedValues({"/a": [1]}), 1: NestedValues({"/a": encode((1,), ())})})
    with pytest.raises(CheckpointError, match=r"different values \(/a\).*OrderedDict.*Counter"):
        join_values({0: NestedValues(classes={"/a": "OrderedDict"}), 1: NestedValues(classes={"/a": "Counter"})})
