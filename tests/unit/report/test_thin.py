from __future__ import annotations

import numpy
import pytest

from trainer.report.thin import smoothed, thinned

COUNT = 300_000


def test_no_spike_and_no_gap_disappears() -> None:
    curve = numpy.random.default_rng(0).normal(size=COUNT)
    spikes, dips = [17, 150_000, COUNT - 2], [71_234]
    gaps = [151, 152_345]  # the first shares its section with a spike
    curve[spikes], curve[dips], curve[gaps[0]], curve[gaps[1]] = 50.0, -50.0, numpy.nan, numpy.inf
    places = thinned(curve, 12_000).tolist()
    assert {0, *spikes, *dips, *gaps, COUNT - 1} <= set(places)
    assert places == sorted(set(places))
    assert len(places) <= 12_002


def test_a_curve_without_a_finite_value_keeps_its_marks() -> None:
    assert len(thinned(numpy.full(10_000, numpy.nan), 3_000)) >= 1_000
    assert thinned(numpy.arange(9.0), 9).tolist() == list(range(9))


def test_a_running_mean_leaves_out_values_that_are_not_finite() -> None:
    values = numpy.array([1.0, numpy.nan, 3.0, 5.0, numpy.inf])
    assert smoothed(values, 2).tolist() == pytest.approx([1.0, 1.0, 3.0, 4.0, 5.0])
