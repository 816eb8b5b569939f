"""Ranges that a run passes over: the map of positions, and what a resume with other ranges makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import examples
from trainer.data.position_map import PositionMap, parse_ranges, resume_map

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))), max_size=4)


def positions(position_map: PositionMap, first: int, count: int) -> list[int]:
    return list(position_map.positions(np.arange(first, first + count)))


@examples(60)
@given(st.lists(st.tuples(RANGES, st.integers(0, 20)), min_size=1, max_size=4))
def test_no_change_repeats_a_sample_or_makes_a_gap_again(phases: list[tuple[list[tuple[int, int]], int]]) -> None:
    position_map, count, trained = PositionMap(), 0, list[int]()
    for ranges, iterations in phases:
        requested = PositionMap.of(ranges)
        begin = trained[-1] + 1 if trained else 0
        resumed = resume_map(position_map, requested, count, count, lengths=(16, 16))
        assert resumed.position == begin
        position_map = PositionMap.from_record(resumed.map.record())
        assert position_map == resumed.map
        trained += positions(position_map, count, iterations)
        count += iterations
        assert position_map.end(count) == (trained[-1] + 1 if trained else 0)
        # Behind the begin nothing has changed, ahead exactly the requested positions are missing.
        assert positions(position_map, 0, count) == trained
        ahead = [position for position in trained if position >= begin]
        gaps = {position for first, end in ranges for position in range(first, end)}
        assert ahead == [p for p in range(begin, begin + 200) if p not in gaps][: len(ahead)]


def test_a_change_is_a_line() -> None:
    saved = parse_ranges(["4-8", "30-40"])

    def lines(requested: list[str], count: int = 10) -> list[str]:
        return list(resume_map(saved, parse_ranges(requested), count, count, lengths=(16, 16)).lines)

    assert lines(["4-8", "30-40"]) == lines(["30-40"]) == lines(["5-6", "30-40"]) == []
    assert lines(["4-8"]) == [
        "train.skip_samples: from position 14 on, none is skipped; before, it was 30-40",
    ]
    late, ahead = lines(["2-3", "12-16", "30-40"])
    assert late.startswith("train.skip_samples: 2-3, 12-14 is before position 14")
    assert ahead == "train.skip_samples: from position 14 on, 14-16, 30-40 is skipped; before, it was 30-40"


def test_another_length_of_samples_keeps_the_position() -> None:
    resumed = resume_map(parse_ranges(["4-8"]), PositionMap(), 12, 6, lengths=(16, 32))
    assert resumed.position == resumed.map.end(6) == 8
    assert positions(resumed.map, 6, 2) == [8, 9]


@pytest.mark.parametrize("text", ["", "4", "8-4", "4-4", "-4-8", "4-8-12", "4 - 8", "1e3-2e3", "1-" + 30 * "9"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not FIRST-END"):
        parse_ranges([text])


@pytest.mark.parametrize("record", [None, {}, [[1]], [[3, 2]], [[1, 2], [2, 3]], [[5, 6], [1, 2]], [["1", "2"]]])
def test_a_malformed_record_is_refused(record: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        PositionMap.from_record(record)
