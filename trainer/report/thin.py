"""Thins and smooths curves for a screen."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from trainer.metrics.log_file import Floats

_KEPT = 3  # points per section


def thinned(values: Floats, most: int) -> NDArray[numpy.int64]:
    """Return the indices of about `most` points, or all. No extreme and no gap is lost.

    Sections of equal length keep their smallest and largest finite value, and their first nonfinite value.
    """
    everything = numpy.arange(len(values))
    if len(values) <= most:
        return everything
    chosen = {0, len(values) - 1}
    for section in numpy.array_split(everything, most // _KEPT):
        part, is_gap = values[section], ~numpy.isfinite(values[section])
        lowest, highest = (numpy.where(is_gap, edge, part) for edge in (numpy.inf, -numpy.inf))
        chosen |= {section[place] for place in (lowest.argmin(), highest.argmax(), is_gap.argmax())}
    return numpy.array(sorted(chosen))


def smoothed(values: Floats, window: int) -> Floats:
    """Return the mean over the finite values among the last `window` points."""
    finite, weights = numpy.isfinite(values), numpy.ones(window)
    sums, counts = (numpy.convolve(part, weights)[: len(values)] for part in (numpy.where(finite, values, 0.0), finite))
    with numpy.errstate(invalid="ignore", divide="ignore"):
        means: Floats = sums / counts
    return means
