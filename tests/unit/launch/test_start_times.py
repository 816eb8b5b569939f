"""The seconds of a start, on a clock that the tests set."""

from __future__ import annotations

import pytest

from tests.fakes import Clock
from trainer.launch import start_times
from trainer.launch.start_times import StartTimes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(start_times, "time", clock := Clock())
    return clock


def after(clock: Clock, *ends: tuple[str, float]) -> StartTimes:
    """Return the times of a start, with phases that end at the given times."""
    times = StartTimes()
    for phase, now in ends:
        clock.now = now
        times.end(phase)
    return times


def test_every_second_counts_to_one_phase(clock: Clock) -> None:
    times = after(
        clock,
        ("imports", 101.9),
        ("rendezvous", 102.5),
        ("imports", 102.6),
        ("build", 102.7),
        ("data", 102.8),
        ("build", 103.0),
        ("load", 103.4),
    )
    found = {"seconds": 3.4, "imports": 2.0, "rendezvous": 0.6, "data": 0.1, "build": 0.3, "load": 0.4}
    assert times.seconds() == pytest.approx(found)
    assert str(times) == "started in 3.4 s: imports 2.0, rendezvous 0.6, data 0.1, build 0.3, load 0.4"
