"""Computes a blend's source and sample index at every position, in closed form.

A blend repeats a period with D positions, in which source i has exactly its a_i places. The places follow an
earliest-deadline schedule: source i's copy j may be taken only once the source's share is above j - 1, and must be
taken before its share exceeds j. Such a schedule exists for any weights (Tijdeman 1980, "The chairman assignment
problem"; Steiner and Yeomans 1993, "Level schedules for mixed-model, just-in-time processes"), so at every position
each source's count differs from its exact share by less than 1. Memory holds a single period, at most `MOST_PERIOD`
positions.

Invariant: values never change between versions, or every running job would see samples twice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from trainer.data.data_file import Ints

# A start schedules a period in Python, at about 0.5 us per position.
MOST_PERIOD = 2**17


class Blend:
    """The order in which weighted sources are read.

    Args:
        weights: Positive, with any sum. Their order affects the blend order.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self._places, self.is_exact = places_of(weights)
        self._sources, self._ranks = _schedule(self._places)

    @property
    def shares(self) -> list[Fraction]:
        """Return each source's share: its weight divided by the weight sum, rounded if not `is_exact`."""
        return [Fraction(places, self.period) for places in self._places]

    @property
    def period(self) -> int:
        """Return the number of positions after which the sources repeat."""
        return len(self._sources)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return each position's source, and how many earlier positions have the same source.

        Args:
            positions: Not negative, any shape.
        """
        rounds, offsets = np.divmod(positions, self.period)
        sources = self._sources[offsets]
        return sources, rounds * np.asarray(self._places, np.int64)[sources] + self._ranks[offsets]

    def counts(self, position: int) -> list[int]:
        """Count each source's samples among the first `position` positions."""
        rounds, offset = divmod(position, self.period)
        remainder = np.bincount(self._sources[:offset], minlength=len(self._places)).tolist()
        return [rounds * places + more for places, more in zip(self._places, remainder, strict=True)]


def places_of(weights: Sequence[Fraction]) -> tuple[list[int], bool]:
    """Return each source's places in a period, and whether they match the weights exactly.

    If the weights need a period above `MOST_PERIOD`, they are rounded to multiples of 1 / `MOST_PERIOD`: down, then up
    by 1 for the largest remainders, and never to 0. If no weight is below 1 / `MOST_PERIOD`, the rounding error is
    below 1 / `MOST_PERIOD` for each share.
    """
    total = sum(weights, Fraction())
    shares = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MOST_PERIOD:
        return [int(share * period) for share in shares], True
    scaled = [share * MOST_PERIOD for share in shares]
    places = [max(1, math.floor(share)) for share in scaled]
    # Remainders are negative if a share was raised to 1 place.
    remainders = sorted(range(len(places)), key=lambda i: (places[i] - scaled[i], i))
    missing = MOST_PERIOD - sum(places)
    for number in remainders[: max(0, missing)]:
        places[number] += 1
    for _ in range(-missing):
        places[places.index(max(places))] -= 1
    divisor = math.gcd(*places)
    return [count // divisor for count in places], False


def _schedule(places: Sequence[int]) -> tuple[Ints, Ints]:
    """Return each position's source within a period, and its number among that source's positions."""
    period, count = sum(places), len(places)
    releases, jobs = [], []
    for source, share in enumerate(places):
        number = np.arange(share, dtype=np.int64)
        releases.append(number * period // share)
        jobs.append(-((number + 1) * -period // share) * count + source)  # the deadline, then the source
    release = np.concatenate(releases)
    by_release = np.argsort(release, kind="stable")
    waiting = np.concatenate(jobs)[by_release].tolist()
    released = np.searchsorted(release[by_release], np.arange(period), side="right").tolist()
    ready: list[int] = []
    job_order, at = [], 0
    for until in released:
        for job in waiting[at:until]:
            heapq.heappush(ready, job)
        at = until
        job_order.append(heapq.heappop(ready))
    deadlines, sources = np.divmod(np.asarray(job_order, np.int64), count)
    assert (deadlines > np.arange(period)).all(), "no source is late"
    ranks = np.empty(period, np.int64)
    ranks[np.argsort(sources, kind="stable")] = np.concatenate([np.arange(share) for share in places])
    return sources, ranks
