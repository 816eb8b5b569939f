"""Only standard JSON goes in and comes out, and its numbers are checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import CheckpointError
from reprise.format.manifest import digest_of
from reprise.storage import json_file
from reprise.storage.json_file import MAX_INTEGER, Json, dumps, finite_number, integer
from tests.messages import refused

NAN, INF = math.nan, math.inf


def test_json_round_trips_as_readable_text() -> None:
    value: Json = {"format": "x/1", "name": "é\n", "loss": None, "lr": 1e-5, "deep": {"list": [1, 2.5, True]}}
    data = json_file.to_bytes(value)
    assert data.endswith(b"}\n")
    assert "é".encode() in data
    assert json_file.parse(data, where="x") == value


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 1


def test_numbers_that_json_lacks_become_null_at_every_depth() -> None:
    value = {"a": NAN, "b": [1.5, (INF, {"c": -INF})], "d": True, "e": "NaN", "f": None}
    text = dumps(value)
    assert json.loads(text) == {"a": None, "b": [1.5, [None, {"c": None}]], "d": True, "e": "NaN", "f": None}
    assert "\n" not in text


def test_a_large_sealed_file_is_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, encode = list[int](), json_file._COMPACT.encode

    def note(value: object) -> str:
        sizes.append(len(encode(value)))
        return encode(value)

    monkeypatch.setattr(json_file._COMPACT, "encode", note)
    json_file.sealed({"files": {str(number): ["digest"] * 100 for number in range(100)}})
    assert max(sizes) < 1000  # the encoder blocks all other threads


@pytest.mark.parametrize(
    "body",
    [
        {"format": "x"},
        {
            "format": "x",
            "files": {},
            "tensors": {'a\u00e9"': {"view": [1, 2], "digests": "00"}, "b": {}},
            "hosts": ["h"],
        },
        {"host": None, "held": {"w": [0, 1], "v": []}},
    ],
)
def test_a_sealed_file_is_the_text_of_its_body(body: json_file.Json) -> None:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))[:-1]
    data = json_file.sealed(body)
    assert data.startswith(text.encode())
    assert json.loads(data) == {**body, "xxh3_64": digest_of(text.encode())}


@pytest.mark.parametrize(
    "state",
    [NAN, INF, -INF, object(), b"x", "\ud800", {"\ud800": 1}, nested(64), pytest.param(10**5000, id="digits")],
)
def test_what_json_lacks_is_refused(state: object) -> None:
    with pytest.raises(CheckpointError):
        json_file.to_bytes({"before": [1, {"x": None}], "state": state})


def test_what_nests_as_deep_as_may_be_comes_back() -> None:
    value: Json = {"a": nested(json_file.MAX_DEPTH - 1)}
    assert json_file.parse(json_file.to_bytes(value), where="x") == value


def test_a_file_that_is_missing_too_large_or_a_pipe_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "there.json").write_bytes(b'{"a": 12345}')
    assert json_file.read(tmp_path / "there.json") == {"a": 12345}
    os.truncate(tmp_path / "there.json", json_file.MAX_BYTES + 1)
    for name in ("gone.json", "pipe.json", "there.json"):
        with refused(CheckpointError, name):
            json_file.read(tmp_path / name)


@pytest.mark.parametrize(
    ("check", "values", "others"),
    [
        (integer, [0, 1, MAX_INTEGER], [-1, MAX_INTEGER + 1, True, 1.0, "1", None]),
        (partial(integer, most=7), [7], [8]),
        (finite_number, [0, -3, 1.5, -1e18], [NAN, INF, -INF, 1e19, 10**400, True, "1", None, [1]]),
        (partial(finite_number, least=0), [0], [-0.5]),
    ],
)
def test_a_number_is_one_of_its_range(check: Callable[[object], float], values: list[float], others: list[Any]) -> None:
    assert [check(value) for value in values] == values
    for other in others:
        with pytest.raises(ValueError, match="is not a"):
            check(other)


def test_a_finite_number_is_a_float() -> None:
    assert type(finite_number(3)) is float


def test_constants_are_refused_unless_they_are_converted() -> None:
    data = b'{"a": [NaN, -Infinity], "b": 1}'
    assert json_file.parse(data, where="x", constant=lambda _: None) == {"a": [None, None], "b": 1}
    with pytest.raises(CheckpointError, match="NaN"):
        json_file.parse(data, where="x")
