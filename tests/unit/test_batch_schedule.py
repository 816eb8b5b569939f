from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.batch_schedule import BatchSchedule, parse_batch_schedule


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    borders = draw(st.lists(st.integers(1, 60), max_size=4))
    firsts = [0, *itertools.accumulate(borders)]
    return BatchSchedule(tuple((first, draw(st.integers(1, 9))) for first in firsts))


def test_a_text_is_read_with_its_suffixes() -> None:
    found = parse_batch_schedule("0:8  4k:16 1M:32")
    assert found.steps == ((0, 8), (4_000, 16), (1_000_000, 32))
    assert (str(found), found.sizes, found.last) == ("0:8 4000:16 1000000:32", (8, 16, 32), 32)
    assert parse_batch_schedule(str(found)) == found
    assert [found.at(consumed) for consumed in (0, 3_999, 4_000, 999_999, 10**9)] == [8, 8, 16, 16, 32]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must begin with the size at sample 0"),
        ("4:8", "must begin with the size at sample 0"),
        ("0:8 4000", "'4000' is not SAMPLES:SIZE"),
        ("0:8 4K:16", "'4K:16' is not SAMPLES:SIZE"),
        ("0:8 -1:16", "'-1:16' is not SAMPLES:SIZE"),
        ("0:8 4k:16 4k:32", "ascending"),
        ("0:8 8k:16 4k:32", "ascending"),
        ("0:0", "at least 1"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_batch_schedule(text)


@given(schedules(), st.integers(0, 60))
def test_the_closed_forms_agree_with_counting(schedule: BatchSchedule, iterations: int) -> None:
    consumed = [0]
    for _ in range(iterations):
        consumed.append(consumed[-1] + schedule.at(consumed[-1]))
    assert schedule.consumed_after(iterations) == consumed[-1]
    for begun, first in enumerate(consumed):
        assert schedule.iterations(first, consumed[-1]) == iterations - begun
        assert schedule.iterations(first, consumed[-1] + schedule.at(consumed[-1]) - 1) == iterations - begun
    assert schedule.iterations(consumed[-1] + 1, consumed[-1]) == 0
