"""The seconds of a start, on a clock that the tests set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import DEADLINE_S
from trainer.launch.start_times import StartTimes, since_boot, started_at


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def after(clock: Clock, *ends: tuple[str, float]) -> StartTimes:
    """Return the times of a process that began at 100, with phases that end at the given times."""
    clock.now = 101.0
    times = StartTimes(100.0, clock=clock)
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


@pytest.mark.parametrize("name", ["python", "a b", ") 1 2 (", "((("])
def test_the_start_of_a_process_is_read_whatever_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(str(number) for number in range(4, 22))  # field 22 is the start
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "7/stat").write_text(f"7 ({name}) S {fields} {12 * ticks} 9 9\n")
    assert started_at(7, proc=tmp_path) == 12.0


@pytest.mark.parametrize("text", [None, "", "7 (python) S 1", "7 (python) S " + "x " * 40])
def test_a_start_that_is_not_shown_is_unknown(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "7").mkdir()
    if text is not None:
        (tmp_path / "7/stat").write_text(text)
    assert started_at(7, proc=tmp_path) is None


_CHILD = """
from trainer.launch.start_times import StartTimes, since_boot
times = StartTimes.of_process()
times.end("imports")
print(since_boot(), *times.seconds().values())
"""


def test_a_process_counts_from_its_start() -> None:
    before = since_boot()
    printed = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    now, total, imports, *rest = map(float, printed.stdout.split())
    assert 0 < imports <= now - before + 0.02
    assert total == imports
    assert set(rest) == {0.0}
