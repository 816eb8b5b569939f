"""Blends: shares at every position, random access, rounding of weights, and samples of several sources."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from trainer.data.blend import MOST_PERIOD, Blend, places_of

decimals = st.one_of(st.integers(1, 20), st.integers(1, 2000)).map(lambda number: Fraction(number, 100))
weights = st.lists(decimals, min_size=1, max_size=12)


@examples(40)
@given(weights=weights, positions=st.lists(st.integers(0, 10**15), min_size=1, max_size=8))
def test_any_position_is_found_without_the_others(weights: list[Fraction], positions: list[int]) -> None:
    blend = Blend(weights)
    sources, index = blend.locate(np.array(positions))
    for position, source, number in zip(positions, sources.tolist(), index.tolist(), strict=True):
        before, after = blend.counts(position), blend.counts(position + 1)
        assert sum(before) == position
        assert [b - a for a, b in zip(before, after, strict=True)] == [int(n == source) for n in range(len(weights))]
        assert number == before[source]
        for count, share in zip(before, blend.shares, strict=True):
            assert abs(count - share * position) < 1


def test_weights_without_a_short_period_are_rounded() -> None:
    wanted = [Fraction(1, 3), Fraction(123457, 1000003), Fraction(1, 10**9)]
    places, is_exact = places_of(wanted)
    assert not is_exact
    assert sum(places) <= MOST_PERIOD
    total = sum(wanted)
    for count, weight in zip(places, wanted, strict=True):
        assert abs(Fraction(count, sum(places)) - weight / total) < Fraction(1, MOST_PERIOD)
    assert min(places) == 1
    assert places_of([Fraction(n) for n in (2, 4, 6)]) == ([1, 2, 3], True)


def test_the_order_of_a_blend_never_changes() -> None:
    sources, index = Blend([Fraction(1, 2), Fraction(1, 5), Fraction(3, 10)]).locate(np.arange(12))
    assert sources.tolist() == [0, 2, 0, 1, 0, 2, 0, 1, 0, 2, 0, 2]
    assert index.tolist() == [0, 0, 1, 0, 2, 1, 3, 1, 4, 2, 5, 3]
