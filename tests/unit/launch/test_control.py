"""Who may ask a running job for what, and when it has been served."""

from __future__ import annotations

import signal

import pytest

from tests.fakes import Clock
from tests.harness import compose
from trainer.config.schema import Config
from trainer.launch import control as module
from trainer.launch.control import ControlFlags, RunControl
from trainer.launch.signals import SignalHandler


def config(*rules: str) -> Config:
    return compose([*rules, "checkpoint.save=null"])


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", CLOCK)


class Job:
    """The control of a running job."""

    def __init__(self, *rules: str, rank: int = 0) -> None:
        self.control = RunControl(config(*rules), SignalHandler(lambda _: None), rank=rank)

    def after(self, seconds: float) -> ControlFlags:
        """Return what is asked for after some seconds more."""
        CLOCK.now += seconds
        return self.control.now()

    def saves(self, seconds: int) -> int:
        """Return how many saves are asked for, and served, within some seconds."""
        count = 0
        for _ in range(seconds):
            if self.after(1.0).save:
                count += 1
                self.control.saving()
        return count


def test_a_save_is_due_so_many_minutes_after_the_last_one() -> None:
    job = Job("checkpoint.save_interval_mins=1.5")
    CLOCK.now += 500.0  # building takes its time
    job.control.begin()
    assert [job.saves(seconds) for seconds in (89, 1, 89, 1)] == [0, 1, 0, 1]
    job.after(89.0)
    job.control.saving()  # for another reason
    assert not job.after(89.0).save
    assert job.after(1.0).save


@pytest.mark.parametrize(("minutes", "seconds"), [(0.5, 30.0), (2, 120.0), (0.001, 0.06)])
def test_the_job_ends_when_its_time_is_over(minutes: float, seconds: float) -> None:
    job = Job(f"train.exit_duration_in_mins={minutes}")
    job.control.begin()
    assert not job.after(seconds - 0.01).stop
    assert job.after(0.02).stop


def test_only_rank_0_looks_at_the_clock() -> None:
    for rank, expected in ((0, ControlFlags(stop=True, save=True)), (1, ControlFlags())):
        job = Job("train.exit_duration_in_mins=1e-9", "checkpoint.save_interval_mins=1e-9", rank=rank)
        assert job.after(1.0) == expected
    never = Job("checkpoint.exit_on_save_failure=0")
    never.control.begin()
    CLOCK.now += 1e9
    assert never.control.now(failed_saves=1000) == ControlFlags()


def test_so_many_failed_saves_end_the_run() -> None:
    control = Job("checkpoint.exit_on_save_failure=3", rank=1).control
    ends = [control.now(failed_saves=count).exit_on_save_failure for count in range(5)]
    assert ends == [False, False, False, True, True]


def test_a_signal_on_any_rank_asks_for_the_end() -> None:
    signals = SignalHandler(lambda _: None)
    control = RunControl(config(), signals, rank=1)
    control.begin()
    assert not control.is_signalled()
    assert not control.now().stop
    signals.receive(signal.SIGTERM)
    assert control.is_signalled()
    assert control.now() == ControlFlags(stop=True)
    assert control.reason(1) == "SIGTERM"


def test_an_exit_interval_ends_a_run_at_its_multiples() -> None:
    control = Job("train.exit_interval=3").control
    assert [iteration for iteration in range(1, 10) if control.exits_after(iteration)] == [3, 6, 9]
    assert control.reason(6) == "train.exit_interval=3"
    assert "time limit" in control.reason(5)
    assert not any(map(Job().control.exits_after, range(1, 10)))
