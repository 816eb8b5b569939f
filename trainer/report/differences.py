"""The difference of two runs: a curve, and the verdict of `compare-loss`."""

from __future__ import annotations

import numpy

from trainer.compare.curves import QUANTITIES, Curve, compare, tolerance_of
from trainer.compare.read import CONFIG_FILE, read_dtype
from trainer.metrics.log_file import Floats, Integers, MetricColumns
from trainer.report.history import History


def difference_of(base: History, test: History) -> tuple[Integers, Floats, str]:
    """Compare the losses of two runs, under the default tolerance of `compare-loss`.

    Returns:
        The iterations of both, the absolute differences of their losses, infinite where only one is finite, and the
        verdict of `compare-loss`.
    """
    curves = [_curve_of(history) for history in (base, test)]
    comparison = compare(*curves, tolerance=tolerance_of(*curves))
    return comparison.points.base.iterations, comparison.points.sizes, comparison.verdict


def _curve_of(history: History) -> Curve:
    log = history.log
    iterations, places = numpy.unique(log.columns.iterations, return_index=True)
    count = len(QUANTITIES)
    points = MetricColumns(
        iterations, QUANTITIES, log.columns.values[:count, places], log.columns.kinds[:count, places]
    )
    return Curve(log.source, points, log.evaluations, dtype=read_dtype(history.folder / CONFIG_FILE))
