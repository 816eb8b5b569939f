"""Which checkpoints stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.saving.policy import Retention


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
    committed = [8, 1, 3, 2, 5, 4, 7, 6]
    assert Retention(keep, retain).expired(committed, pinned=pinned) == expired
    assert Retention(keep, retain, kept=frozenset(pinned)).expired(committed) == expired


@pytest.mark.parametrize(
    ("committed", "interim", "expired"),
    [
        ([4, 5], [5], []),  # it is the newest, and does not count against the two that stay
        ([4, 8, 9], [9], []),
        ([4, 8, 9, 12], [9], [4, 9]),
        ([1, 2, 3], [1, 2, 3], [1]),  # where nothing else was saved, as many stay as of others
        ([4, 5, 6, 7], [5, 6, 7], [5]),
        ([4, 5, 6, 8], [5, 6], [5, 6]),
        ([3, 6, 9, 10, 11], [3, 6], [3, 6, 9]),  # neither the interval of 3 nor the best loss keeps them
    ],
)
def test_interim_ones_stay_until_a_later_due_one(committed: list[int], interim: list[int], expired: list[int]) -> None:
    losses = {number: float(number) for number in committed if number in (3, 6)}
    retention = Retention(2, save_retain_interval=6, keep_best=1)
    assert retention.expired(committed, interim=interim, losses=losses) == expired


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20), st.integers(1, 4), st.integers(0, 5))
def test_interruptions_leave_what_the_unbroken_run_keeps(ends: list[tuple[bool, bool]], keep: int, retain: int) -> None:
    """Of each iteration: whether the schedule asks for a save, and whether the run is interrupted there."""
    retention = Retention(keep, retain)
    whole, broken, interim = list[int](), list[int](), set[int]()
    for iteration, (is_due, is_interrupted) in enumerate(ends, 1):
        if is_due:
            whole = sorted({*whole, iteration} - set(retention.expired([*whole, iteration])))
        if is_due or is_interrupted:
            interim |= set() if is_due else {iteration}
            left = retention.expired([*broken, iteration], interim=interim)
            assert not set(left) & set(whole)
            assert iteration not in left
            broken = sorted({*broken, iteration} - set(left))
        if is_due:
            assert broken == whole
