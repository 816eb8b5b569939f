"""The difference of two runs: a curve, and the verdict of `compare-loss`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from trainer.compare.curves import compare, tolerance_of
from trainer.compare.points import Curve, Point, Reading
from trainer.compare.read import CONFIG_FILE, METRICS_FILE, read_dtype
from trainer.report.history import Floats, History, LogColumns

Mask = NDArray[numpy.bool_]


class _Quantities(NamedTuple):
    loss: Floats
    grad_norm: Floats
    lr: Floats


@dataclass(frozen=True, slots=True)
class RunDifference:
    """The difference of two runs.

    Attributes:
        common: the places of the iterations of both in the columns of the second.
        sizes: absolute differences of the losses of these; infinite where only one of them is finite.
        verdict: the last line of `reprise compare-loss`.
    """

    common: NDArray[numpy.int64]
    sizes: Floats
    verdict: str


def difference_of(base: History, test: History) -> RunDifference:
    """Compare the losses of two runs, under the default tolerance of `compare-loss`."""
    a, b = base.log.columns, test.log.columns
    _, of_base, of_test = numpy.intersect1d(a.iteration, b.iteration, return_indices=True)
    base_values, test_values = (
        _Quantities(columns.loss[places], columns.grad_norm[places], columns.lr[places])
        for columns, places in ((a, of_base), (b, of_test))
    )
    equal = numpy.logical_and.reduce([_equal_bits(x, y) for x, y in zip(base_values, test_values, strict=True)])
    with numpy.errstate(invalid="ignore"):
        sizes = numpy.abs(base_values.loss - test_values.loss)
    sizes[_equal_bits(base_values.loss, test_values.loss)] = 0.0
    sizes[numpy.isnan(sizes)] = numpy.inf
    # Iterations with an evaluation stay in the comparison, which looks at both losses of them.
    equal &= ~numpy.isin(a.iteration[of_base], [*base.evaluations(), *test.evaluations()])
    curves = [_curve_without(history, places[equal]) for history, places in ((base, of_base), (test, of_test))]
    comparison = compare(*curves, tolerance=tolerance_of(*curves))
    count = int(equal.sum())
    comparison = replace(comparison, compared=comparison.compared + count, bit_equal=comparison.bit_equal + count)
    return RunDifference(of_test, sizes, comparison.verdict)


def _equal_bits(a: Floats, b: Floats) -> Mask:
    mask: Mask = (a.view(numpy.int64) == b.view(numpy.int64)) | (numpy.isnan(a) & numpy.isnan(b))
    return mask


def _curve_without(history: History, places: NDArray[numpy.int64]) -> Curve:
    """Return the curve of a run but for iterations of equal bits, which need no comparison."""
    remaining: Mask = numpy.ones(history.log.columns.iteration.size, dtype=bool)
    remaining[places] = False
    columns: LogColumns = history.log.columns.where(remaining)
    points = [
        Point(int(iteration), Reading(loss, True), Reading(grad_norm, True), Reading(lr, True))
        for iteration, loss, grad_norm, lr in zip(
            columns.iteration.tolist(),
            columns.loss.tolist(),
            columns.grad_norm.tolist(),
            columns.lr.tolist(),
            strict=True,
        )
    ]
    dtype = read_dtype(history.folder / CONFIG_FILE)
    return Curve(str(history.folder / METRICS_FILE), tuple(points), dtype=dtype, evaluations=history.evaluations())
