"""A point of a loss curve, and a difference of two."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
