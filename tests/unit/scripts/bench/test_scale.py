"""The benchmark of scale runs a real commit, and fits exponents."""

from __future__ import annotations

import math

import pytest

from scripts.bench import scale


@pytest.mark.slow
def test_a_commit_is_measured_beside_simulated_ranks() -> None:
    figures = scale.measure_commit("rows", 4)
    assert figures["first B/rank"] > figures["later B/rank"] <= 100
    assert figures["manifest MB"] > 0


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    assert math.isclose(scale.exponent([1, 10, 100], [2.0, 200.0, 20000.0]), 2.0)
    assert math.isnan(scale.exponent([1], [1.0]))
    assert math.isnan(scale.exponent([1, 2], [0.0, 1.0]))


def test_the_table_has_a_column_for_each_size() -> None:
    measure = scale.Measure(lambda size: {"s": size * 1.0}, (1, 2), "ranks")
    lines = scale.table("x", measure, {size: measure.run(size) for size in measure.sizes}).splitlines()
    assert lines[0].split() == ["x:", "ranks", "1", "2", "exponent"]
    assert lines[1].split() == ["s", "1", "2", "1.00"]
