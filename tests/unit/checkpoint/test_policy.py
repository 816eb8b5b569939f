"""Which checkpoints stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.policy import Retention

iterations = st.lists(st.integers(0, 10**9), unique=True)


@pytest.mark.parametrize(
    ("keep", "retain", "pinned", "doomed"),
    [
        (0, 0, (), []),
        (0, 4, (), []),
        (2, 0, (), [1, 2, 3, 4, 5, 6]),
        (1, 4, (), [1, 2, 3, 5, 6, 7]),
        (3, 3, (), [1, 2, 4, 5]),
        (2, 0, (1, 5), [2, 3, 4, 6]),
        (9, 0, (), []),
    ],
)
def test_the_newest_the_multiples_and_the_pinned_stay(
    keep: int, retain: int, pinned: tuple[int, ...], doomed: list[int]
) -> None:
    assert Retention(keep, retain).doomed([8, 1, 3, 2, 5, 4, 7, 6], pinned=pinned) == doomed


@given(iterations, st.integers(1, 5), st.integers(0, 7), st.sets(st.integers(0, 20)))
def test_the_newest_is_never_deleted_and_nothing_goes_twice(
    committed: list[int], keep: int, retain: int, pinned: set[int]
) -> None:
    retention = Retention(keep, retain)
    doomed = retention.doomed(committed, pinned=pinned)
    assert not set(doomed) & set(sorted(committed)[-keep:])
    assert not set(doomed) & pinned
    left = [iteration for iteration in committed if iteration not in doomed]
    assert len(left) >= min(keep, len(committed))
    assert retention.doomed(left, pinned=pinned) == []
