"""Numbers of JSON documents: which are accepted, and how numbers that JSON lacks are written."""

from __future__ import annotations

import json
import math

import pytest

from reprise.json_value import MAX_INTEGER, dumps, finite_number, integer, step_count

NAN, INF = math.nan, math.inf


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
