"""A loss curve, a point of it, and a difference of two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.compare.formats import OURS, Meaning

QUANTITIES = ("loss", "grad_norm", "lr")


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
        """The absolute difference, as `absolute_difference` defines it."""
        return absolute_difference(self.base.value, self.test.value)


def absolute_difference(base: float, test: float) -> float:
    """Return |base - test|: 0 for nan and nan or inf and the same inf, otherwise inf if a value is not finite."""
    if base == test or (math.isnan(base) and math.isnan(test)):
        return 0.0
    return abs(base - test) if math.isfinite(base) and math.isfinite(test) else math.inf
