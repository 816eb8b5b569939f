"""Only standard JSON goes in and comes out, and its numbers are checked."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from reprise import json_file
from reprise.errors import CheckpointError
from reprise.format.manifest import digest_of
from reprise.json_file import MAX_INTEGER, Json, dumps, finite_number, integer, step_count

NAN, INF = math.nan, math.inf


def test_json_round_trips_as_readable_text() -> None:
    value: Json = {"format": "x/1", "name": "é\n", "loss": None, "lr": 1e-5, "deep": {"list": [1, 2.5, True]}}
    data = json_file.to_bytes(value)
    assert data.endswith(b"}\n")
    assert "é".encode() in data
    assert json_file.parse(data, where="x") == value


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), object(), {1, 2}, b"x", "\ud800", nested(64), (nested(63),)]
)
def test_to_bytes_refuses_what_standard_json_does_not_have(value: object) -> None:
    with pytest.raises(CheckpointError, match="cannot be stored as JSON"):
        json_file.to_bytes({"a": [value]})


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"b": [0, 1, 2, object()]}}, 'state["a"]["b"][3]'),
        ({"a": 1, "b": (1, float("nan"))}, 'state["b"][1]'),
        ({"a": {(1, 2): 3}}, 'state["a"][(1, 2)]'),
        ({"\u00e9": "\ud800"}, 'state["\u00e9"]'),
        ({"\ud800": 1}, r'state["\ud800"]'),
        ({"a": 10**5000}, 'state["a"]'),
        ({"a": nested(63)}, 'state["a"]' + 63 * "[0]"),
    ],
)
def test_to_bytes_names_the_place_of_what_json_lacks(state: object, place: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        json_file.to_bytes({"before": [1, {"x": None}], "state": state})
    assert str(caught.value).startswith(f"A value cannot be stored as JSON ({place}), expected ")


def test_what_nests_as_deep_as_may_be_comes_back() -> None:
    value: Json = {"a": nested(json_file.MAX_DEPTH - 1)}
    assert json_file.parse(json_file.to_bytes(value), where="x") == value


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a": NaN}', "NaN is not standard JSON"),
        (b'{"a": [Infinity]}', "Infinity is not standard JSON"),
        (b'{"a": -Infinity}', "-Infinity is not standard JSON"),
        (b'{"a": 1, "a": 1}', "a key occurs twice"),
        (b'{"b": {"a": 1, "a": 2}}', "a key occurs twice"),
        (b"[1]", "list"),
        (b"null", "NoneType"),
        (b"", "Expecting value"),
        (b'{"a": 1', "delimiter"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": 1e999}', "out of the range of a float"),
        (b'{"a": "\\ud800"}', "surrogates"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nests deeper than 64"),
        # The second from Python 3.14 on.
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion|Stack overflow"),
    ],
)
def test_parse_refuses_what_is_no_standard_json_object(data: bytes, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        json_file.parse(data, where="some/file.json")
    assert "some/file.json" in str(caught.value)


def test_parse_refuses_a_file_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_BYTES", 10)
    with pytest.raises(CheckpointError, match="too large"):
        json_file.parse(b'{"a": "12345"}', where="x")


def test_read_names_the_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.json"):
        json_file.read(tmp_path / "gone.json")
    (tmp_path / "there.json").write_bytes(b'{"a": 1}')
    assert json_file.read(tmp_path / "there.json") == {"a": 1}


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        json_file.read(path)


@pytest.mark.parametrize("value", [0, 1, MAX_INTEGER])
def test_an_integer_is_returned(value: int) -> None:
    assert integer(value) == value


@pytest.mark.parametrize("value", [-1, MAX_INTEGER + 1, True, 1.0, "1", None])
def test_another_value_is_not_an_integer(value: object) -> None:
    with pytest.raises(ValueError, match=f"is not an integer from 0 to {MAX_INTEGER}"):
        integer(value)


def test_an_integer_has_the_bound_of_the_call() -> None:
    assert integer(7, most=7) == 7
    with pytest.raises(ValueError, match="8 is not an integer from 0 to 7"):
        integer(8, most=7)


@pytest.mark.parametrize("value", [0, -3, 1.5, -1e18])
def test_a_finite_number_is_a_float(value: float) -> None:
    found = finite_number(value)
    assert (found, type(found)) == (value, float)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e19, 10**400, True, "1", None, [1]])
def test_another_value_is_not_a_finite_number(value: object) -> None:
    with pytest.raises(ValueError, match=r"is not a finite number$"):
        finite_number(value)


def test_a_finite_number_has_the_bound_of_the_call() -> None:
    assert finite_number(0, least=0) == 0.0
    with pytest.raises(ValueError, match=r"-0\.5 is not a finite number of at least 0"):
        finite_number(-0.5, least=0)


def test_a_step_count_is_a_whole_number_of_either_type() -> None:
    assert (step_count(3), step_count(3.0)) == (3.0, 3.0)


@pytest.mark.parametrize("value", [2.5, -1, NAN, True, "3"])
def test_another_value_is_not_a_step_count(value: object) -> None:
    with pytest.raises(ValueError, match="is not a"):
        step_count(value)


def test_numbers_that_json_lacks_become_null_at_every_depth() -> None:
    value = {"a": NAN, "b": [1.5, (INF, {"c": -INF})], "d": True, "e": "NaN", "f": None}
    text = dumps(value)
    assert json.loads(text) == {"a": None, "b": [1.5, [None, {"c": None}]], "d": True, "e": "NaN", "f": None}
    assert "\n" not in text


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
