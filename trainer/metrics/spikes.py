"""Detects spikes in the loss and the gradient norm: values far above the running median.

Every checkpoint stores the window, so a resumed run detects the same spikes as an uninterrupted run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from reprise.storage import Json, finite_number
from trainer.data.position_map import PositionMap

SPIKES = "spikes"  # the key in trainer_state.json
_TO_DEVIATION = 1.4826  # scales a normal distribution's median absolute deviation to its standard deviation
_LEAST_DEVIATION = 0.01  # as a share of the median, so that rounding on a flat curve causes no spike


@dataclass(frozen=True, slots=True)
class Spike:
    """A value far above the running median.

    Args:
        figure: `loss` or `grad_norm`.
        limit: The exceeded threshold.
    """

    iteration: int
    figure: str
    value: float
    limit: float

    def __str__(self) -> str:
        """Describe the spike for messages."""
        name = self.figure.replace("grad_", "gradient ")
        return f"{name} {self.value:.6g} at iteration {self.iteration}, above {self.limit:.6g}"


class SpikeWatch:
    """Compares each iteration with the window before it. All ranks see the same values and so detect the same spikes.

    Args:
        factor: How many standard deviations above the median a value may lie. The deviation is estimated from the
            median absolute deviation, and is at least 1% of the median.
        window: How many values the median covers. No finite value is a spike before the window is full.

    Attributes:
        rewound: The position ranges skipped after spikes, in order.
    """

    def __init__(self, factor: float, window: int) -> None:
        self._factor, self._window = factor, window
        self._figures = {name: deque[float](maxlen=window) for name in ("loss", "grad_norm")}
        self.rewound: list[tuple[int, int]] = []

    def add(self, iteration: int, loss: float, grad_norm: float) -> Spike | None:
        """Add an iteration's values and return its spike, if any. A nonfinite value is a spike."""
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
        """Return the `spikes` value for `trainer_state.json`."""
        return {**{name: list(figures) for name, figures in self._figures.items()}, "rewound": list(self.rewound)}

    def resume(self, record: object) -> None:
        """Restore a record. If it covers a larger window, only the last values are kept.

        Raises:
            LookupError, TypeError, ValueError: The record is malformed.
        """
        if not isinstance(record, Mapping):
            raise TypeError(f"spikes are {record!r}")
        for name, figures in self._figures.items():
            figures.extend(finite_number(value) for value in record[name])
        self.rewound = [PositionMap.from_record([gap]).gaps[0] for gap in record["rewound"]]
