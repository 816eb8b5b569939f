"""Which checkpoints stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.policy import Retention

iterations = st.lists(st.integers(0, 10**9), unique=True)


@pytest.mark.parametrize(
    ("keep", "retain", "pinned", "expired"),
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
    keep: int, retain: int, pinned: tuple[int, ...], expired: list[int]
) -> None:
    assert Retention(keep, retain).expired([8, 1, 3, 2, 5, 4, 7, 6], pinned=pinned) == expired


@given(iterations, st.integers(1, 5), st.integers(0, 7), st.sets(st.integers(0, 20)))
def test_the_newest_is_never_deleted_and_nothing_goes_twice(
    committed: list[int], keep: int, retain: int, pinned: set[int]
) -> None:
    retention = Retention(keep, retain)
    expired = retention.expired(committed, pinned=pinned)
    assert not set(expired) & set(sorted(committed)[-keep:])
    assert not set(expired) & pinned
    left = [iteration for iteration in committed if iteration not in expired]
    assert len(left) >= min(keep, len(committed))
    assert retention.expired(left, pinned=pinned) == []
