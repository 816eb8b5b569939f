"""Sums that depend neither on the order of the values nor on their division among ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.optim import exact_sum


def _value(sums: Sequence[torch.Tensor]) -> float:
    """Return the number of limbs that ranks have added."""
    return exact_sum.value(torch.stack(list(sums)).sum(0).tolist())


def _sum_limbs(values: torch.Tensor) -> torch.Tensor:
    """Return the limbs of a vector that stands beside another."""
    return exact_sum.sum_limbs([torch.ones(3), values])[1]


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(floats, max_size=50), st.randoms(), st.integers(1, 6))
def test_the_sum_is_exact_for_any_order_and_division(values: list[float], random: object, ranks: int) -> None:
    expected = math.fsum(values)
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    sums = [_sum_limbs(torch.tensor(shuffled[rank::ranks], dtype=torch.float64)) for rank in range(ranks)]
    if not values:
        assert sums[0].tolist() == [0] * exact_sum.COLUMNS
    assert _value(sums) == expected


@given(st.lists(floats, max_size=20), st.lists(floats, max_size=20))
def test_the_sum_of_numbers_in_float64_is_rounded_once(values: list[float], squares: list[float]) -> None:
    numbers = [*values, *(square * square for square in squares), 1 / 3]
    limbs = exact_sum.limbs(torch.tensor(numbers, dtype=torch.float64))
    assert _value([limbs.sum(0)]) == math.fsum(numbers)
    assert [_value([row]) for row in limbs] == numbers


def test_the_sum_of_the_most_ranks_fits() -> None:
    limbs = exact_sum.limbs(torch.tensor([2.0**309 + 2.0**260, -3.75], dtype=torch.float64))
    ranks = 1 << 31
    assert exact_sum.value((limbs[0] * ranks).tolist()) == (2.0**309 + 2.0**260) * ranks
    assert exact_sum.value((limbs[1] * ranks).tolist()) == -3.75 * ranks


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
    ],
)
def test_what_is_not_finite_stays_so(values: list[float], expected: float) -> None:
    summed = _sum_limbs(torch.tensor(values))
    single = exact_sum.limbs(torch.tensor(values, dtype=torch.float64)).sum(0)
    assert [repr(_value([sums, _sum_limbs(torch.ones(3))])) for sums in (summed, single)] == [repr(expected)] * 2


def squares_of(*tables: torch.Tensor) -> torch.Tensor:
    return torch.cat(exact_sum.row_squares(tables))


@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 40))
def test_squares_of_a_row_ignore_the_other_rows(rows: int, columns: int, cut: int) -> None:
    gradient = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 100 + columns))
    whole = squares_of(gradient)
    pieces = [squares_of(piece) for piece in (gradient[:cut], gradient[cut:]) if piece.shape[0]]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.allclose(whole, gradient.double().square().sum(1).float(), rtol=1e-6)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 70)), min_size=1, max_size=8))
def test_tables_of_any_widths_are_squared_together(shapes: list[tuple[int, int]]) -> None:
    tables = [torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) for shape in shapes]
    alone = torch.cat([squares_of(table) for table in tables])
    assert torch.equal(squares_of(*tables).sort().values, alone.sort().values)


def test_large_gradients_are_squared_in_blocks_of_rows() -> None:
    gradient = torch.randn(3000, 999)  # more elements than are squared at a time
    sums = exact_sum.row_squares([gradient])
    assert torch.equal(torch.cat(sums)[-5:], squares_of(gradient[-5:]))
    assert sum(rows.untyped_storage().nbytes() for rows in sums) == 4 * len(gradient), "no view keeps the squares"
    vector = torch.randn(17, 1)  # each element is a row
    assert torch.equal(squares_of(vector), vector[:, 0].square())
