"""The points of a loss curve, as columns: a million iterations take 60 MB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy
from numpy.typing import NDArray

QUANTITIES = ("loss", "grad_norm", "lr")

Integers = NDArray[numpy.int64]
Floats = NDArray[numpy.float64]
Mask = NDArray[numpy.bool_]


@dataclass(frozen=True, slots=True)
class Reading:
    """A number of a curve; `exact` if its bits are known, which a decimal does not give."""

    value: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Point:
    """The values logged after an iteration; None for a quantity not logged."""

    iteration: int
    loss: Reading
    grad_norm: Reading | None = None
    lr: Reading | None = None


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
