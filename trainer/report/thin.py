"""Thins curves to a screen's resolution at several zoom levels, without losing extremes or gaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

COARSEST = 2_000  # points in the fully zoomed-out curve
FACTOR = 5  # ratio between the point counts of adjacent levels

Indices = NDArray[numpy.int64]


def levels(values: NDArray[numpy.float64], *, most: int) -> list[Indices]:
    """Return the point indices for each level, coarsest first. The last level has about `most` points, or all.

    A level divides the curve into sections of equal length, and keeps each section's smallest and largest finite value
    and its first nonfinite value.

    Args:
        values: A curve's values, in order.
        most: How many points the finest level has.
    """
    counts, count = list[int](), COARSEST
    while count < min(most, len(values)):
        counts.append(count)
        count *= FACTOR
    everything = numpy.arange(len(values))
    finest = [everything] if len(values) <= most else [_thinned(values, most)]
    return [*(_thinned(values, count) for count in counts), *finest]


def _thinned(values: NDArray[numpy.float64], count: int) -> Indices:
    from tsdownsample import MinMaxDownsampler, NaNMinMaxDownsampler

    finite = numpy.where(numpy.isfinite(values), values, numpy.nan)
    extremes = MinMaxDownsampler().downsample(finite, n_out=count)
    parts = [extremes.astype(numpy.int64), numpy.array([0, len(values) - 1])]
    if numpy.isnan(finite).any():
        # NaNMinMaxDownsampler returns a section's NaN instead of its extremes, so each needs its own pass.
        indices = NaNMinMaxDownsampler().downsample(finite, n_out=count).astype(numpy.int64)
        parts.append(indices[numpy.isnan(finite[indices])])
    return numpy.unique(numpy.concatenate(parts))


def smoothed(values: NDArray[numpy.float64], windows: Sequence[int]) -> dict[int, NDArray[numpy.float64]]:
    """Return the mean over the finite values among the last `window` points, for windows shorter than the curve."""
    finite = numpy.isfinite(values)
    sums = numpy.concatenate([[0.0], numpy.cumsum(numpy.where(finite, values, 0.0))])
    counts = numpy.concatenate([[0], numpy.cumsum(finite)])
    means = dict[int, NDArray[numpy.float64]]()
    ends = numpy.arange(1, len(values) + 1)
    for window in windows:
        if window < len(values):
            begins = numpy.maximum(ends - window, 0)
            number = counts[ends] - counts[begins]
            with numpy.errstate(invalid="ignore", divide="ignore"):
                means[window] = (sums[ends] - sums[begins]) / number
    return means
