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


def requests(rules: ControlRules, clock: Clock, *, rank: int = 0, folder: Path | None = None) -> RunControl:
    return RunControl(rules, None, rank=rank, folder=folder, clock=clock)


def test_a_save_is_due_so_many_minutes_after_the_last_one() -> None:
    clock = Clock()
    asked = requests(ControlRules(save_interval_mins=1.5), clock)
    clock.now += 500.0  # building takes its time
    asked.begin()
    due = []
    for seconds in range(0, 301, 30):
        clock.now = 1500.0 + seconds
        if asked.now().save:
            due.append(seconds)
            asked.saving()
    assert due == [90, 180, 270]


def test_a_save_for_another_reason_begins_the_interval_anew() -> None:
    clock = Clock()
    asked = requests(ControlRules(save_interval_mins=1.0), clock)
    asked.begin()
    clock.now += 59.0
    asked.saving()
    clock.now += 59.0
    assert not asked.now().save
    clock.now += 1.0
    assert asked.now().save


def test_zero_is_never() -> None:
    clock = Clock()
    asked = requests(ControlRules(), clock)
    asked.begin()
    clock.now += 1e9
    assert asked.now(failed_saves=1000) == ControlFlags()


@pytest.mark.parametrize(("minutes", "seconds"), [(0.5, 30.0), (2, 120.0), (0.001, 0.06)])
def test_the_job_ends_when_its_time_is_over(minutes: float, seconds: float) -> None:
    clock = Clock()
    asked = requests(ControlRules(exit_duration_in_mins=minutes), clock)
    asked.begin()
    clock.now += seconds - 0.01
    assert not asked.now().stop
    clock.now += 0.02
    assert asked.now().stop


def test_only_rank_0_looks_at_clock_and_files(tmp_path: Path) -> None:
    (tmp_path / SAVE_NOW).touch()
    rules = ControlRules(exit_duration_in_mins=1e-9, save_interval_mins=1e-9)
    for rank, expected in ((0, ControlFlags(stop=True, save=True)), (1, ControlFlags())):
        clock = Clock()
        asked = requests(rules, clock, rank=rank, folder=tmp_path)
        clock.now += 1.0
        assert asked.now() == expected


def test_a_touched_file_asks_for_one_save_and_is_then_gone(tmp_path: Path) -> None:
    clock = Clock()
    asked = requests(ControlRules(), clock, folder=tmp_path)
    asked.begin()
    assert not asked.now().save
    (tmp_path / SAVE_NOW).touch()
    assert not asked.now().save  # looked at once a second
    clock.now += 1.0
    assert asked.now().save
    assert asked.now().save  # until it is served
    assert (tmp_path / SAVE_NOW).exists()
    asked.saving()
    assert not (tmp_path / SAVE_NOW).exists()
    clock.now += 5.0
    assert not asked.now().save


def test_a_save_that_nobody_touched_a_file_for_removes_none(tmp_path: Path) -> None:
    asked = requests(ControlRules(), Clock(), folder=tmp_path)
    assert not asked.now().save
    (tmp_path / SAVE_NOW).touch()
    asked.saving()
    assert (tmp_path / SAVE_NOW).exists()


def test_so_many_failed_saves_end_the_run() -> None:
    asked = requests(ControlRules(give_up_after=3), Clock(), rank=1)
    assert [asked.now(failed_saves=count).give_up for count in range(5)] == [False, False, False, True, True]


def test_a_signal_on_any_rank_asks_for_the_end() -> None:
    watch = SignalHandler(3600.0, leave=lambda _: None)
    asked = RunControl(ControlRules(), watch, rank=1, folder=None)
    asked.begin()
    assert not asked.is_signalled()
    assert not asked.now().stop
    watch.receive(signal.SIGTERM)
    assert asked.is_signalled()
    assert asked.now() == ControlFlags(stop=True)
    assert asked.reason() == "SIGTERM"


flags = st.builds(ControlFlags, st.booleans(), st.booleans(), st.booleans())


@given(st.lists(flags, min_size=1, max_size=5))
def test_what_any_rank_asks_for_all_agree_on(each: list[ControlFlags]) -> None:
    agreed = ControlFlags.of([max(flags) for flags in zip(*(asked.flags() for asked in each), strict=True)])
    assert agreed.stop == any(asked.stop for asked in each)
    assert agreed.save == any(asked.save for asked in each)
    assert agreed.give_up == any(asked.give_up for asked in each)


def saves_asked(asked: RunControl, clock: Clock, seconds: int) -> int:
    count = 0
    for _ in range(seconds):
        clock.now += 1.0
        if asked.now().save:
            count += 1
            asked.saving()
    return count


def test_a_folder_in_its_place_asks_for_no_save_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    asked = requests(ControlRules(), clock, folder=tmp_path)
    (tmp_path / SAVE_NOW).mkdir()
    assert saves_asked(asked, clock, 5) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / SAVE_NOW} is ignored: it is a folder; a file of this name requests a save"
    ]
    (tmp_path / SAVE_NOW).rmdir()
    (tmp_path / SAVE_NOW).touch()
    assert saves_asked(asked, clock, 5) == 1


def test_an_unremovable_file_asks_for_one_save_each_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "unlink", refuse)  # as in another user's folder with the sticky bit
    clock = Clock()
    asked = requests(ControlRules(), clock, folder=tmp_path)
    for second in (1, 2):
        (tmp_path / SAVE_NOW).touch()
        os.utime(tmp_path / SAVE_NOW, (second, second))
        assert saves_asked(asked, clock, 5) == 1
    assert "cannot be removed: Operation not permitted" in caplog.text
