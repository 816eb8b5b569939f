"""Finds spikes of the loss and of the gradient norm: values far above the running median. Pure.

Its values are in every checkpoint, so a resumed run finds the spikes of an undisturbed one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from reprise.storage import Json, finite_number
from trainer.data.position_map import PositionMap

SPIKES = "spikes"  # the member of trainer_state.json
_TO_DEVIATION = 1.4826  # of the median absolute deviation of a normal distribution
_LEAST_DEVIATION = 0.01  # of the median, so that a flat curve has no spike of a rounding


@dataclass(frozen=True, slots=True)
class Spike:
    """A value far above the running median.

    Args:
        figure: `loss` or `grad_norm`.
        limit: the largest value that would be none.
    """

    iteration: int
    figure: str
    value: float
    limit: float

    def __str__(self) -> str:
        """Return the spike in words."""
        name = self.figure.replace("grad_", "gradient ")
        return f"{name} {self.value:.6g} at iteration {self.iteration}, above {self.limit:.6g}"


class SpikeWatch:
    """Compares each iteration with the window before it. All ranks have the same figures, and find the same.

    Args:
        factor: how many standard deviations above the median a value may be. They are estimated by the median absolute
            deviation, and are at least a hundredth of the median.
        window: iterations of the median; there is no spike before so many.

    Attributes:
        rewound: the ranges of positions that the run has passed over after spikes, in order.
    """

    def __init__(self, factor: float, window: int) -> None:
        self._factor, self._window = factor, window
        self._figures = {name: deque[float](maxlen=window) for name in ("loss", "grad_norm")}
        self.rewound: list[tuple[int, int]] = []

    def add(self, iteration: int, loss: float, grad_norm: float) -> Spike | None:
        """Count an iteration, and return its spike, if any; a nonfinite value is one."""
        spikes = []
        for (name, figures), value in zip(self._figures.items(), (loss, grad_norm), strict=True):
            limit = self._limit(figures)
            if value > limit or not math.isfinite(value):
                spikes.append(Spike(iteration, name, value, limit))
            if math.isfinite(value):
                figures.append(value)
        return spikes[0] if spikes else None

    def _limit(self, figures: deque[float]) -> float:
        if len(figures) < self._window:
            return math.inf
        middle = median(figures)
        deviation = _TO_DEVIATION * median(abs(value - middle) for value in figures)
        return middle + self._factor * max(deviation, _LEAST_DEVIATION * middle)

    def record(self) -> Json:
        """Return the member `spikes` of `trainer_state.json`."""
        return {**{name: list(figures) for name, figures in self._figures.items()}, "rewound": list(self.rewound)}

    def resume(self, record: object) -> None:
        """Go on from a record; of a larger window the last values count.

        Raises:
            LookupError, TypeError, ValueError: if it is malformed.
        """
        if not isinstance(record, Mapping):
            raise TypeError(f"spikes are {record!r}")
        for name, figures in self._figures.items():
            figures.extend(finite_number(value) for value in record[name])
        self.rewound = [PositionMap.from_record([gap]).gaps[0] for gap in record["rewound"]]
