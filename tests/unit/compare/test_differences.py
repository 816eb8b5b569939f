"""The differences of two curves in columns are those of a list of them."""

from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from trainer.compare.columns import Points
from trainer.compare.differences import Differences, difference_at
from trainer.compare.points import CurveDifference, Point, Reading
from trainer.compare.read import VALID_LOSS

VALUES = st.builds(Reading, st.sampled_from([0.0, 1.5, 2.5]), st.just(True))


@given(st.data(), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 12)), st.booleans())
def test_they_are_in_the_order_of_a_sorted_list(
    data: st.DataObject, iterations: set[int], evaluated: set[int], apart: bool
) -> None:
    base, test = (Points.of([Point(n, data.draw(VALUES), data.draw(VALUES)) for n in sorted(iterations)]) for _ in "ab")
    mask = numpy.array(data.draw(st.lists(st.booleans(), min_size=3 * len(base), max_size=3 * len(base))), dtype=bool)
    mask = mask.reshape(3, len(base))
    evaluations = [CurveDifference(n, VALID_LOSS, data.draw(VALUES), data.draw(VALUES)) for n in sorted(evaluated)]
    expected = [difference_at(base, test, q, place) for place in range(len(base)) for q in range(3) if mask[q, place]]
    expected += evaluations
    expected.sort(key=lambda d: (apart and d.quantity == VALID_LOSS and d.iteration not in iterations, d.iteration))
    found = Differences.of(base, test, mask, evaluations, apart=apart)
    assert [*map(repr, found)] == [*map(repr, expected)]
    assert repr(found[1:3]) == repr(tuple(expected[1:3]))
    assert found.distinct_iterations() == tuple(sorted({d.iteration for d in expected}))
