"""The difference between two runs: a curve, and the `compare-loss` verdict."""

from __future__ import annotations

import numpy

from trainer.compare.curves import QUANTITIES, Curve, compare, tolerance_of
from trainer.compare.read import CONFIG_FILE, read_dtype
from trainer.metrics.log_file import Floats, Integers, MetricColumns
from trainer.report.history import History


def difference_of(base: History, test: History) -> tuple[Integers, Floats, str]:
    """Compare two runs' losses, with the default `compare-loss` tolerance.

    Returns:
        The common iterations, the absolute loss differences, and the `compare-loss` verdict. A difference is infinite
        where only one loss is finite.
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
