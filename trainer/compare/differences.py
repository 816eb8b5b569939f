"""The differences of two loss curves in columns; one is built when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy

from trainer.compare.columns import Integers, Mask, Points
from trainer.compare.points import QUANTITIES, CurveDifference, Reading


@dataclass(frozen=True, slots=True, eq=False)
class Differences(Sequence[CurveDifference]):
    """The differences of two curves with the same iterations, and of their validation losses.

    Args:
        places: of the points that differ.
        quantities: that differ there, by their places in `QUANTITIES`.
        evaluations: the differences of validation losses.
        iterations: of the differences of points, then of validation losses.
        order: of the differences, by their places in `iterations`.
    """

    base: Points
    test: Points
    places: Integers
    quantities: Integers
    evaluations: Sequence[CurveDifference]
    iterations: Integers
    order: Integers

    @staticmethod
    def of(
        base: Points, test: Points, mask: Mask, evaluations: Sequence[CurveDifference], *, apart: bool = False
    ) -> Differences:
        """Return the differences in order of iteration.

        Args:
            mask: which values differ, of shape (quantities, points).
            apart: whether validation losses at iterations without a point come last.
        """
        places, quantities = mask.T.nonzero()
        evaluated = numpy.array([difference.iteration for difference in evaluations], dtype=numpy.int64)
        iterations = numpy.concatenate((base.iterations[places], evaluated))
        is_apart = numpy.zeros(len(iterations), dtype=bool)
        is_apart[len(places) :] = apart & ~numpy.isin(evaluated, base.iterations)
        order = numpy.lexsort((iterations, is_apart))
        return Differences(base, test, places, quantities, evaluations, iterations, order)

    def distinct_iterations(self) -> tuple[int, ...]:
        """Return the iterations with a difference, each once and in order."""
        ordered = numpy.sort(self.iterations, kind="stable")  # merges what is in order
        return tuple(ordered[numpy.diff(ordered, prepend=-1) > 0].tolist())

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, number: int) -> CurveDifference: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[CurveDifference, ...]: ...

    def __getitem__(self, number: int | slice) -> CurveDifference | tuple[CurveDifference, ...]:
        if isinstance(number, slice):
            return tuple(self[place] for place in range(len(self))[number])
        place = int(self.order[number])
        if place >= len(self.places):
            return self.evaluations[place - len(self.places)]
        return difference_at(self.base, self.test, int(self.quantities[place]), int(self.places[place]))


def difference_at(base: Points, test: Points, quantity: int, place: int) -> CurveDifference:
    """Return the difference of a quantity of two points; a value that was not logged is nan."""
    readings = base.reading(quantity, place), test.reading(quantity, place)
    reference, candidate = (reading or Reading(math.nan, False) for reading in readings)
    return CurveDifference(int(base.iterations[place]), QUANTITIES[quantity], reference, candidate)
