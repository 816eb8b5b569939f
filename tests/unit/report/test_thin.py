from __future__ import annotations

import numpy
import pytest

from trainer.report.thin import COARSEST, levels, smoothed

COUNT = 300_000


def test_no_spike_and_no_gap_disappears_at_any_level() -> None:
    curve = numpy.random.default_rng(0).normal(size=COUNT)
    spikes, dips = [17, 150_000, COUNT - 2], [71_234]
    gaps = [151, 152_345]  # the first shares its section with a spike
    curve[spikes], curve[dips], curve[gaps[0]], curve[gaps[1]] = 50.0, -50.0, numpy.nan, numpy.inf
    parts = levels(curve, most=20_000)
    assert [len(part) for part in parts] == sorted(len(part) for part in parts)
    assert len(parts) == 3
    for part in parts:
        assert {*spikes, *dips, *gaps} <= set(part.tolist())
        assert len(part) <= 2 * 20_000
    assert len(parts[0]) < 2 * COARSEST


def test_a_curve_without_a_finite_value_keeps_its_marks() -> None:
    parts = levels(numpy.full(10_000, numpy.nan), most=5_000)
    assert all(len(part) >= COARSEST / 4 for part in parts)
    assert len(levels(numpy.arange(9_000, dtype=float), most=20_000)[-1]) == 9_000
    assert [part.tolist() for part in levels(numpy.arange(9.0), most=20_000)] == [list(range(9))]


def test_a_running_mean_leaves_out_values_that_are_not_finite() -> None:
    means = smoothed(numpy.array([1.0, numpy.nan, 3.0, 5.0, numpy.inf]), [2, 10])
    assert means.keys() == {2}
    assert means[2].tolist() == pytest.approx([1.0, 1.0, 3.0, 4.0, 5.0])
