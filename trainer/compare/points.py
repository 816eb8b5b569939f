"""A point of a loss curve."""

from __future__ import annotations

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
