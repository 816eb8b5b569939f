"""The points of a loss curve as columns, and their differences: a million iterations take 60 MB."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy
from numpy.typing import NDArray

from trainer.compare.points import QUANTITIES, Curve, Point, Reading

Integers = NDArray[numpy.int64]
Floats = NDArray[numpy.float64]
Mask = NDArray[numpy.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Points(Sequence[Point]):
    """Points in columns; equal to any sequence of the same points. A point is built when it is asked for.

    Args:
        iterations: of shape (points,).
        values: of shape (3, points), a row for each of `QUANTITIES`; 0 where a quantity was not logged.
        exact: of the same shape: whether the bits are known.
        present: of the same shape: whether the quantity was logged.
    """

    iterations: Integers
    values: Floats
    exact: Mask
    present: Mask

    @staticmethod
    def of(points: Sequence[Point]) -> Points:
        """Return points as columns."""
        if isinstance(points, Points):
            return points
        readings = [(point.loss, point.grad_norm, point.lr) for point in points]
        shape = (len(points), len(QUANTITIES))
        cells = [reading for row in readings for reading in row]
        values = numpy.array([0.0 if cell is None else cell.value for cell in cells], dtype=float)
        exact = numpy.array([cell is not None and cell.exact for cell in cells], dtype=bool)
        present = numpy.array([cell is not None for cell in cells], dtype=bool)
        return Points(
            numpy.array([point.iteration for point in points], dtype=numpy.int64),
            values.reshape(shape).T,
            exact.reshape(shape).T,
            present.reshape(shape).T,
        )

    def reading(self, quantity: int, place: int) -> Reading | None:
        """Return the value of a quantity, by its place in `QUANTITIES`; None if it was not logged."""
        if not self.present[quantity, place]:
            return None
        return Reading(float(self.values[quantity, place]), bool(self.exact[quantity, place]))

    def loss(self, place: int) -> Reading:
        """Return the loss of a point."""
        return Reading(float(self.values[0, place]), bool(self.exact[0, place]))

    def take(self, places: Integers) -> Points:
        """Return the points at some places."""
        values, exact, present = self.values[:, places], self.exact[:, places], self.present[:, places]
        return Points(self.iterations[places], values, exact, present)

    def without(self, iterations: Integers) -> Points:
        """Return the points but for those of some iterations."""
        return self.take(numpy.flatnonzero(~numpy.isin(self.iterations, iterations)))

    def __len__(self) -> int:
        return len(self.iterations)

    @overload
    def __getitem__(self, place: int) -> Point: ...

    @overload
    def __getitem__(self, place: slice) -> Points: ...

    def __getitem__(self, place: int | slice) -> Point | Points:
        if isinstance(place, slice):
            return self.take(numpy.arange(len(self))[place])
        iteration = int(self.iterations[place])
        return Point(iteration, self.loss(place), self.reading(1, place), self.reading(2, place))

    def __eq__(self, points: object) -> bool:
        if not isinstance(points, Sequence) or len(self) != len(points):
            return False
        return all(a == b for a, b in zip(self, points, strict=True))

    __hash__ = None  # type: ignore[assignment]


def common_points(base: Points, test: Points) -> tuple[Points, Points]:
    """Return the points of two curves, each in order, at the iterations that both have."""
    if numpy.array_equal(base.iterations, test.iterations):
        return base, test
    _, *places = numpy.intersect1d(base.iterations, test.iterations, assume_unique=True, return_indices=True)
    return base.take(places[0]), test.take(places[1])


def windows(curve: Curve) -> Integers:
    """Return how many iterations each loss of a curve is the mean of; 0 if that is unknown."""
    iterations = Points.of(curve.points).iterations
    if not curve.meaning.is_mean:
        return numpy.full(len(iterations), 0 if curve.meaning.is_mean is None else 1)
    steps = numpy.diff(iterations, prepend=0)
    intervals, counts = numpy.unique(steps[1:] if len(steps) > 1 else steps, return_counts=True)
    # A line that is lost widens no mean.
    means: Integers = numpy.minimum(steps, intervals[counts.argmax()])
    return means


def missing_iterations(points: Points, iterations: Integers) -> Integers:
    """Return the iterations of points, in order, that are not among some of them."""
    if len(points) == len(iterations):
        return numpy.empty(0, dtype=numpy.int64)
    return numpy.sort(numpy.setdiff1d(points.iterations, iterations, assume_unique=True))


def unequal(base: Points, test: Points) -> Mask:
    """Return which values certainly differ, of two curves with the same iterations, of shape (3, points).

    Exact bits beside a decimal prove nothing, unless either is not finite.
    """
    a, b = base.values, test.values
    equal: Mask = numpy.equal(_bits_of(a), _bits_of(b)) | (numpy.isnan(a) & numpy.isnan(b))
    proves: Mask = (base.exact == test.exact) | ~(numpy.isfinite(a) & numpy.isfinite(b))
    return base.present & test.present & ~equal & proves


def _bits_of(values: Floats) -> Integers:
    return numpy.ascontiguousarray(values).view(numpy.int64)


def absolute_differences(base: Floats, test: Floats) -> Floats:
    """Return |base - test|: 0 for nan and nan or inf and the same inf, otherwise inf if a value is not finite."""
    with numpy.errstate(invalid="ignore", over="ignore"):
        sizes = numpy.abs(base - test)
    sizes[~(numpy.isfinite(base) & numpy.isfinite(test))] = math.inf
    sizes[(base == test) | (numpy.isnan(base) & numpy.isnan(test))] = 0.0
    return sizes


def beyond(base: Floats, test: Floats, *, absolute: float, relative: float) -> Mask:
    """Return where |base - test| > absolute + relative * |base|; an infinity or nan equals only itself."""
    sizes = absolute_differences(base, test)
    with numpy.errstate(invalid="ignore", over="ignore"):
        limits = absolute + relative * numpy.abs(base)
    is_admitted = numpy.where(numpy.isfinite(base) & numpy.isfinite(test), sizes <= limits, sizes == 0)
    return numpy.logical_not(is_admitted)
