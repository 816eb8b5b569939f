"""Thins curves to what a screen shows, at several depths of zoom, so that no extreme and no gap disappears. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

COARSEST = 2_000  # points of the curve seen as a whole
FACTOR = 5  # from the number of points of a level to that of the next

Indices = NDArray[numpy.int64]


def levels(values: NDArray[numpy.float64], *, most: int) -> list[Indices]:
    """Return the indices of the points of each level, the coarsest first; the last has about `most`, or all.

    A level divides the curve into sections of equal length and keeps the least and the greatest finite value of each,
    and the first value of each that is not finite.

    Args:
        values: of a curve, in order.
        most: points of the finest level.
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
        # It takes the NaN of a section instead of the extremes, so each has a pass of its own.
        indices = NaNMinMaxDownsampler().downsample(finite, n_out=count).astype(numpy.int64)
        parts.append(indices[numpy.isnan(finite[indices])])
    return numpy.unique(numpy.concatenate(parts))


def smoothed(values: NDArray[numpy.float64], windows: Sequence[int]) -> dict[int, NDArray[numpy.float64]]:
    """Return the mean of the last `window` finite values at each point, for the windows shorter than the curve."""
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
