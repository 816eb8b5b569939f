"""Ranges of positions in the order of samples that a run passes over. Pure.

A run counts the samples that it trains on. Where it passes over some, their positions are further on: the map from
counts to positions is a list of gaps. What lies behind a run never changes: a resume with other ranges changes the map
ahead of the position alone, so no sample comes twice, and no gap is made again.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from reprise.storage import integer

SKIPPED = "skipped"  # the member of trainer_state.json
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")


@dataclass(frozen=True, slots=True)
class PositionMap:
    """The position of each sample that a run trains on.

    Args:
        gaps: ranges of positions to pass over, each with its end excluded; ascending, and apart from each other.
    """

    gaps: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(ranges: Iterable[tuple[int, int]]) -> PositionMap:
        """Return the map with these gaps, which may meet or overlap."""
        gaps = list[tuple[int, int]]()
        for first, end in sorted(gap for gap in ranges if gap[0] < gap[1]):
            if gaps and first <= gaps[-1][1]:
                gaps[-1] = gaps[-1][0], max(end, gaps[-1][1])
            else:
                gaps.append((first, end))
        return PositionMap(tuple(gaps))

    @staticmethod
    def from_record(record: object) -> PositionMap:
        """Return the map in a `trainer_state.json`.

        Raises:
            TypeError, ValueError: if it is malformed.
        """
        if not isinstance(record, list):
            raise TypeError(f"gaps are {record!r}")
        gaps = tuple((integer(first), integer(end)) for first, end in record)
        if PositionMap.of(gaps).gaps != gaps:
            raise ValueError(f"gaps are {record!r}")
        return PositionMap(gaps)

    def record(self) -> list[list[int]]:
        """Return the JSON form."""
        return [list(gap) for gap in self.gaps]

    def steps(self) -> tuple[list[int], list[int]]:
        """Return the counts from which on positions are further ahead, and by how much, with a 0 in front."""
        totals = [0, *accumulate(end - first for first, end in self.gaps)]
        return [first - total for (first, _), total in zip(self.gaps, totals, strict=False)], totals

    def end(self, count: int) -> int:
        """Return the position behind the last of so many samples; a gap that begins there lies ahead."""
        borders, totals = self.steps()
        return count + totals[bisect_right(borders, count - 1)] if count else 0

    def within(self, first: int, stop: float = math.inf) -> PositionMap:
        """Return the map with the gaps in a range of positions alone."""
        return PositionMap.of((max(begin, first), int(min(end, stop))) for begin, end in self.gaps)

    def __str__(self) -> str:
        """Return the gaps as in `train.skip_samples`."""
        return ", ".join(f"{first}-{end}" for first, end in self.gaps) or "none"


def parse_ranges(texts: Sequence[str]) -> PositionMap:
    """Return the map with the gaps of `train.skip_samples`, such as `120000-124000`.

    Raises:
        ValueError: with the reason.
    """
    ranges = []
    for text in texts:
        match = _RANGE.fullmatch(text)
        if match is None or int(match[1]) >= int(match[2]):
            raise ValueError(f"{text!r} is not FIRST-END with FIRST below END, as in 120000-124000")
        ranges.append((int(match[1]), int(match[2])))
    return PositionMap.of(ranges)


@dataclass(frozen=True, slots=True)
class ResumedMap:
    """The map of a resumed run.

    Args:
        map: from here on.
        position: of the run, in samples of its present length.
        lines: to log, where the run asks for another map than its checkpoint.
    """

    map: PositionMap
    position: int
    lines: tuple[str, ...]


def resume_map(
    saved: PositionMap, requested: PositionMap, saved_count: int, count: int, *, lengths: tuple[int, int]
) -> ResumedMap:
    """Return the map of a run that goes on after `count` samples: the saved gaps behind it, the requested ahead.

    Args:
        saved_count: the same count in samples of the saved length.
        lengths: tokens of a sample, saved and present; where they differ, the gaps behind become a single one.
    """
    position = saved.end(saved_count)
    behind, ahead = saved.within(0, position), saved.within(position)
    was, now = lengths
    if was != now:
        position = position * was // now
        behind, ahead = PositionMap.of([(0, position - count)]), PositionMap()
    lines = []
    if (late := requested.within(0, position)).gaps and PositionMap.of([*behind.gaps, *late.gaps]) != behind:
        lines.append(
            f"train.skip_samples: {late} lies behind position {position}, up to which the samples are trained on or "
            f"passed over: nothing changes there"
        )
    if (following := requested.within(position)) != ahead:
        lines.append(
            f"train.skip_samples: from position {position} on {following} is passed over, before it was {ahead}"
        )
    return ResumedMap(PositionMap.of([*behind.gaps, *following.gaps]), position, tuple(lines))
