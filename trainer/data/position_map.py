"""Position ranges in the sample order that a run skips. Pure.

A run counts the samples it trains on. Skipped samples shift all later positions: the map from counts to positions is a
list of gaps. A run's past never changes: a resume with other ranges changes the map only ahead of the position, so no
sample comes twice, and no gap is repeated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprise.storage import integer

if TYPE_CHECKING:
    from trainer.data.data_file import Ints

SKIPPED = "skipped"  # key in trainer_state.json
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")


@dataclass(frozen=True, slots=True)
class PositionMap:
    """Maps a run's sample counts to positions.

    Args:
        gaps: Position ranges to skip, end excluded, ascending and disjoint.
    """

    gaps: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(ranges: Iterable[tuple[int, int]]) -> PositionMap:
        """Return the map with these gaps, which may touch or overlap."""
        gaps = list[tuple[int, int]]()
        for first, end in sorted(gap for gap in ranges if gap[0] < gap[1]):
            if gaps and first <= gaps[-1][1]:
                gaps[-1] = gaps[-1][0], max(end, gaps[-1][1])
            else:
                gaps.append((first, end))
        return PositionMap(tuple(gaps))

    @staticmethod
    def from_record(record: object) -> PositionMap:
        """Return the map from a `trainer_state.json`.

        Raises:
            TypeError, ValueError: The record is malformed.
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

    def positions(self, counts: Ints) -> Ints:
        """Return the positions for samples counted from 0."""
        import numpy as np  # a configuration is checked without it

        totals = np.cumsum([0, *(end - first for first, end in self.gaps)])
        borders = np.array([first for first, _ in self.gaps], np.int64) - totals[:-1]
        positions: Ints = counts + totals[np.searchsorted(borders, counts, side="right")]
        return positions

    def end(self, count: int) -> int:
        """Return the position behind the last of `count` samples. A gap starting there lies ahead."""
        position = count
        for first, end in self.gaps:
            position += (end - first) * (first < position)
        return position

    def within(self, first: int, stop: float = math.inf) -> PositionMap:
        """Return the map restricted to gaps in a position range."""
        return PositionMap.of((max(start, first), int(min(end, stop))) for start, end in self.gaps)

    def __str__(self) -> str:
        """Return the gaps as in `train.skip_samples`."""
        return ", ".join(f"{first}-{end}" for first, end in self.gaps) or "none"


def parse_ranges(texts: Sequence[str]) -> PositionMap:
    """Return the map with the gaps from `train.skip_samples`, such as `120000-124000`.

    Raises:
        ValueError: A range is malformed. The message says why.
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
    """A resumed run's map.

    Args:
        map: The map from here on.
        position: The run's position, in samples with the current length.
        lines: Log lines, if the requested map differs from the checkpoint's.
    """

    map: PositionMap
    position: int
    lines: tuple[str, ...]


def resume_map(
    saved: PositionMap, requested: PositionMap, saved_count: int, count: int, *, lengths: tuple[int, int]
) -> ResumedMap:
    """Return the map for a run that continues after `count` samples: the saved gaps behind it, the requested ahead.

    Args:
        saved_count: The same count in samples with the saved length.
        lengths: Tokens per sample, saved and current. If they differ, the gaps behind merge into a single gap.
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
            f"train.skip_samples: {late} is before position {position}, whose samples were already trained on or "
            f"skipped: it has no effect"
        )
    if (following := requested.within(position)) != ahead:
        lines.append(f"train.skip_samples: from position {position} on, {following} is skipped; before, it was {ahead}")
    return ResumedMap(PositionMap.of([*behind.gaps, *following.gaps]), position, tuple(lines))
