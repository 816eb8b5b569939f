"""Sums that depend neither on the order of the values nor on their division among ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.optim import exact_sum

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(floats, max_size=50), st.randoms(), st.integers(1, 6))
def test_the_sum_is_exact_for_any_order_and_division(values: list[float], random: object, ranks: int) -> None:
    expected = math.fsum(values)
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    parts = [exact_sum.parts(torch.tensor(shuffled[rank::ranks], dtype=torch.float64)) for rank in range(ranks)]
    assert exact_sum.total(part for rank in parts for part in rank) == expected


def test_the_widest_range_of_float32_needs_no_more_parts() -> None:
    smallest, largest = 2.0**-149, float(torch.finfo(torch.float32).max)
    values = torch.tensor([largest, *(2.0**power for power in range(-149, 127, 25)), smallest])
    parts = exact_sum.parts(values)
    assert len(parts) == exact_sum.PARTS
    assert math.fsum([*parts, *(-float(value) for value in values)]) == 0.0


def test_the_sum_of_nothing_is_zero() -> None:
    assert exact_sum.parts(torch.zeros(0)) == (0.0,) * exact_sum.PARTS


@pytest.mark.parametrize(("values", "expected"), [([math.inf, 1.0], math.inf), ([math.nan, 1.0], math.nan)])
def test_what_is_not_finite_stays_so(values: list[float], expected: float) -> None:
    total = exact_sum.total([*exact_sum.parts(torch.tensor(values)), *exact_sum.parts(torch.ones(3))])
    assert repr(total) == repr(expected)


@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 40))
def test_squares_of_a_row_ignore_the_other_rows(rows: int, columns: int, cut: int) -> None:
    gradient = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 100 + columns))
    whole = exact_sum.row_squares(gradient)
    pieces = [exact_sum.row_squares(piece) for piece in (gradient[:cut], gradient[cut:]) if piece.shape[0]]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.allclose(whole, gradient.double().square().sum(1).float(), rtol=1e-6)


def test_large_gradients_are_squared_in_blocks_of_rows() -> None:
    gradient = torch.randn(3000, 3, 333)  # more elements than are squared at a time
    assert torch.equal(exact_sum.row_squares(gradient)[-5:], exact_sum.row_squares(gradient[-5:]))


def test_each_element_of_a_vector_is_a_row() -> None:
    vector = torch.randn(17)
    assert torch.equal(exact_sum.row_squares(vector), vector.square())
