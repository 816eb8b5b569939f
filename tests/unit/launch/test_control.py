"""Who may ask a running job for what, and when it has been served."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.launch.control import SAVE_NOW, ControlFlags, ControlRules, RunControl
from trainer.launch.signals import SignalHandler


class Clock:
    """A clock that goes on when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def control_of(rules: ControlRules, clock: Clock, *, rank: int = 0, folder: Path | None = None) -> RunControl:
    return RunControl(rules, None, rank=rank, folder=folder, clock=clock)


def test_a_save_is_due_so_many_minutes_after_the_last_one() -> None:
    clock = Clock()
    control = control_of(ControlRules(save_interval_mins=1.5), clock)
    clock.now += 500.0  # building takes its time
    control.begin()
    due = []
    for seconds in range(0, 301, 30):
        clock.now = 1500.0 + seconds
        if control.now().save:
            due.append(seconds)
            control.saving()
    assert due == [90, 180, 270]


def test_a_save_for_another_reason_begins_the_interval_anew() -> None:
    clock = Clock()
    control = control_of(ControlRules(save_interval_mins=1.0), clock)
    control.begin()
    clock.now += 59.0
    control.saving()
    clock.now += 59.0
    assert not control.now().save
    clock.now += 1.0
    assert control.now().save


def test_zero_is_never() -> None:
    clock = Clock()
    control = control_of(ControlRules(), clock)
    control.begin()
    clock.now += 1e9
    assert control.now(failed_saves=1000) == ControlFlags()


@pytest.mark.parametrize(("minutes", "seconds"), [(0.5, 30.0), (2, 120.0), (0.001, 0.06)])
def test_the_job_ends_when_its_time_is_over(minutes: float, seconds: float) -> None:
    clock = Clock()
    control = control_of(ControlRules(exit_duration_in_mins=minutes), clock)
    control.begin()
    clock.now += seconds - 0.01
    assert not control.now().stop
    clock.now += 0.02
    assert control.now().stop


def test_only_rank_0_looks_at_clock_and_files(tmp_path: Path) -> None:
    (tmp_path / SAVE_NOW).touch()
    rules = ControlRules(exit_duration_in_mins=1e-9, save_interval_mins=1e-9)
    for rank, expected in ((0, ControlFlags(stop=True, save=True)), (1, ControlFlags())):
        clock = Clock()
        control = control_of(rules, clock, rank=rank, folder=tmp_path)
        clock.now += 1.0
        assert control.now() == expected


def test_a_touched_file_asks_for_one_save_and_is_then_gone(tmp_path: Path) -> None:
    clock = Clock()
    control = control_of(ControlRules(), clock, folder=tmp_path)
    control.begin()
    assert not control.now().save
    (tmp_path / SAVE_NOW).touch()
    assert not control.now().save  # looked at once a second
    clock.now += 1.0
    assert control.now().save
    assert control.now().save  # until it is served
    assert (tmp_path / SAVE_NOW).exists()
    control.saving()
    assert not (tmp_path / SAVE_NOW).exists()
    clock.now += 5.0
    assert not control.now().save


def test_a_save_that_nobody_touched_a_file_for_removes_none(tmp_path: Path) -> None:
    control = control_of(ControlRules(), Clock(), folder=tmp_path)
    assert not control.now().save
    (tmp_path / SAVE_NOW).touch()
    control.saving()
    assert (tmp_path / SAVE_NOW).exists()


def test_so_many_failed_saves_end_the_run() -> None:
    control = control_of(ControlRules(exit_on_save_failure=3), Clock(), rank=1)
    found = [control.now(failed_saves=count).exit_on_save_failure for count in range(5)]
    assert found == [False, False, False, True, True]


def test_a_signal_on_any_rank_asks_for_the_end() -> None:
    signals = SignalHandler(3600.0, leave=lambda _: None)
    control = RunControl(ControlRules(), signals, rank=1, folder=None)
    control.begin()
    assert not control.is_signalled()
    assert not control.now().stop
    signals.receive(signal.SIGTERM)
    assert control.is_signalled()
    assert control.now() == ControlFlags(stop=True)
    assert control.reason(1) == "SIGTERM"


def test_an_exit_interval_ends_a_run_at_its_multiples() -> None:
    control = control_of(ControlRules(exit_interval=3), Clock())
    assert [iteration for iteration in range(1, 10) if control.exits_after(iteration)] == [3, 6, 9]
    assert control.reason(6) == "train.exit_interval=3"
    assert "time limit" in control.reason(5)
    assert not any(map(control_of(ControlRules(), Clock()).exits_after, range(1, 10)))


flags = st.builds(ControlFlags, st.booleans(), st.booleans(), st.booleans())


@given(st.lists(flags, min_size=1, max_size=5))
def test_what_any_rank_asks_for_all_agree_on(each: list[ControlFlags]) -> None:
    agreed = ControlFlags.of([max(flags) for flags in zip(*(control.flags() for control in each), strict=True)])
    assert agreed.stop == any(control.stop for control in each)
    assert agreed.save == any(control.save for control in each)
    assert agreed.exit_on_save_failure == any(control.exit_on_save_failure for control in each)


def saves_control(control: RunControl, clock: Clock, seconds: int) -> int:
    count = 0
    for _ in range(seconds):
        clock.now += 1.0
        if control.now().save:
            count += 1
            control.saving()
    return count


def test_a_folder_in_its_place_asks_for_no_save_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    control = control_of(ControlRules(), clock, folder=tmp_path)
    (tmp_path / SAVE_NOW).mkdir()
    assert saves_control(control, clock, 5) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / SAVE_NOW} is ignored: it is a folder; a file of this name requests a save"
    ]
    (tmp_path / SAVE_NOW).rmdir()
    (tmp_path / SAVE_NOW).touch()
    assert saves_control(control, clock, 5) == 1


def test_an_unremovable_file_asks_for_one_save_each_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "unlink", refuse)  # as in another user's folder with the sticky bit
    clock = Clock()
    control = control_of(ControlRules(), clock, folder=tmp_path)
    for second in (1, 2):
        (tmp_path / SAVE_NOW).touch()
        os.utime(tmp_path / SAVE_NOW, (second, second))
        assert saves_control(control, clock, 5) == 1
    assert "cannot be removed: Operation not permitted" in caplog.text
