"""A loss curve, whose points are columns: a million iterations take 60 MB. A point is built when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from trainer.compare.formats import OURS, Meaning
from trainer.metrics.json_lines import ABSENT, DECIMAL, EXACT
from trainer.metrics.log_file import Floats, Integers, Kinds

QUANTITIES = ("loss", "grad_norm", "lr")
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

    @property
    def bits(self) -> tuple[str | None, ...]:
        """The values in hexadecimal, by `QUANTITIES`."""
        readings = (self.loss, self.grad_norm, self.lr)
        return tuple(None if reading is None else reading.value.hex() for reading in readings)


@dataclass(frozen=True, slots=True, eq=False)
class Points(Sequence[Point]):
    """Points in columns, in order of iteration.

    Args:
        values: of shape (3, points), a row for each of `QUANTITIES`; NaN where a quantity was not logged.
        kinds: of the same shape, as of a log.
    """

    iterations: Integers
    values: Floats
    kinds: Kinds

    @staticmethod
    def of(points: Sequence[Point]) -> Points:
        """Return points as columns."""
        if isinstance(points, Points):
            return points
        pairs = [
            (math.nan, ABSENT) if reading is None else (reading.value, EXACT if reading.exact else DECIMAL)
            for point in points
            for reading in (point.loss, point.grad_norm, point.lr)
        ]
        cells = numpy.array(pairs, dtype=float).reshape(len(points), len(QUANTITIES), 2)
        iterations = numpy.array([point.iteration for point in points], dtype=numpy.int64)
        return Points(iterations, cells[..., 0].T, cells[..., 1].T.astype(numpy.uint8))

    def reading(self, quantity: int, place: int) -> Reading:
        """Return the value of a quantity, by its place in `QUANTITIES`; NaN if it was not logged."""
        return Reading(float(self.values[quantity, place]), bool(self.kinds[quantity, place] == EXACT))

    def take(self, places: Integers | Mask) -> Points:
        """Return the points at some places."""
        return Points(self.iterations[places], self.values[:, places], self.kinds[:, places])

    def without(self, iterations: Integers) -> Points:
        """Return the points but for those of some iterations."""
        return self.take(~numpy.isin(self.iterations, iterations)) if len(iterations) else self

    def __len__(self) -> int:
        return len(self.iterations)

    def __getitem__(self, place: int) -> Point:  # type: ignore[override]
        loss, *further = (
            self.reading(number, place) if kind != ABSENT else None for number, kind in enumerate(self.kinds[:, place])
        )
        assert loss is not None
        return Point(int(self.iterations[place]), loss, *further)

    def __eq__(self, points: object) -> bool:
        return isinstance(points, Sequence) and [*map(repr, self)] == [*map(repr, points)]

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of a run in order of iteration, each iteration at most once; never empty from `read_curve`.

    Attributes:
        source: its file, for messages.
        dtype: the dtype in the run's config.yaml, `float32` or `bfloat16`; None if unknown.
        notes: remarks on the file for the report, such as a truncated last line.
        evaluations: the validation losses by iteration; none from a text log.
        meaning: of its losses.
    """

    source: str
    points: Sequence[Point]
    dtype: str | None = None
    notes: tuple[str, ...] = ()
    evaluations: Mapping[int, Reading] = field(default_factory=dict)
    meaning: Meaning = OURS


@dataclass(frozen=True, slots=True)
class CurveDifference:
    """A quantity of an iteration with different values on the two sides."""

    iteration: int
    quantity: str
    base: Reading
    test: Reading

    @property
    def size(self) -> float:
        """The absolute difference, as `absolute_differences` defines it."""
        return float(absolute_differences(numpy.array(self.base.value), numpy.array(self.test.value)))


def absolute_differences(base: Floats, test: Floats) -> Floats:
    """Return |base - test|: 0 for nan and nan or inf and the same inf, otherwise inf if a value is not finite."""
    with numpy.errstate(invalid="ignore", over="ignore"):
        sizes = numpy.where(numpy.isfinite(base) & numpy.isfinite(test), numpy.abs(base - test), math.inf)
    return numpy.where((base == test) | (numpy.isnan(base) & numpy.isnan(test)), 0.0, sizes)


def certainly_differ(base: Points, test: Points) -> Mask:
    """Return which values certainly differ, of two curves with the same iterations, of shape (3, points).

    Exact bits beside a decimal prove nothing, unless either is not finite.
    """
    a, b = base.values, test.values
    bits_a, bits_b = (numpy.ascontiguousarray(values).view(numpy.int64) for values in (a, b))
    is_equal = (bits_a == bits_b) | (numpy.isnan(a) & numpy.isnan(b))
    is_proved = ((base.kinds == EXACT) == (test.kinds == EXACT)) | ~(numpy.isfinite(a) & numpy.isfinite(b))
    differs: Mask = (base.kinds != ABSENT) & (test.kinds != ABSENT) & ~is_equal & is_proved
    return differs


def common_points(base: Points, test: Points) -> tuple[Points, Points]:
    """Return the points of two curves at the iterations that both have."""
    if numpy.array_equal(base.iterations, test.iterations):
        return base, test
    _, *places = numpy.intersect1d(base.iterations, test.iterations, assume_unique=True, return_indices=True)
    return base.take(places[0]), test.take(places[1])
