"""What the agreements of a start cost, by ranks."""

from __future__ import annotations

from scripts.bench import scale_start


def test_each_call_has_its_cost() -> None:
    figures = scale_start.measure(16)
    assert {name.rpartition(" ")[0] for name in figures} >= set(scale_start.CALLS)
    assert 0 < figures["hosts B/rank"] < 200
    assert figures["agreement B/rank"] == 0
