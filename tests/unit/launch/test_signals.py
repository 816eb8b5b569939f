"""What a signal means, by when it comes."""

from __future__ import annotations

import signal
import threading

import pytest

from trainer.launch.signals import SIGNALS, SignalHandler

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
LONG_S = 3600.0


class Case:
    """A watch under a clock that stands still, whose process does not end."""

    def __init__(self, notice_s: float = LONG_S) -> None:
        self.now = 100.0
        self.statuses: list[int] = []
        self.exit_graces: list[str] = []
        self.has_left = threading.Event()
        self.watch = SignalHandler(
            notice_s, exit_grace=self.exit_graces.append, clock=lambda: self.now, leave=self.leave
        )

    def leave(self, status: int) -> None:
        self.statuses.append(status)
        self.has_left.set()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_wish(number: signal.Signals) -> None:
    case = Case()
    case.watch.await_iteration()
    assert case.watch.name is None
    case.watch.receive(number)
    assert case.watch.name == number.name
    assert case.statuses == []


def test_another_signal_within_two_seconds_is_the_same_wish() -> None:
    case = Case()
    case.watch.await_iteration()
    for now in (100.0, 100.1, 101.9):
        case.now = now
        case.watch.receive(TERM)
    assert case.statuses == []
    assert case.exit_graces == []


@pytest.mark.parametrize("second", SIGNALS)
def test_a_signal_two_seconds_later_is_an_order(second: signal.Signals) -> None:
    case = Case()
    case.watch.await_iteration()
    case.watch.receive(USR1)
    case.now += 2.0
    case.watch.receive(second)
    assert case.statuses == [128 + second]
    assert case.exit_graces == [f"received {second.name} after SIGUSR1"]
    assert case.watch.name == "SIGUSR1"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_first_iteration_is_an_order(number: signal.Signals) -> None:
    case = Case()
    case.watch.receive(number)
    assert case.statuses == [128 + number]
    assert case.exit_graces == [f"received {number.name} before the first iteration"]


def test_a_signal_just_before_the_first_iteration_counts() -> None:
    case = Case()
    case.watch._first = int(TERM), case.now  # taken, and not yet judged
    case.watch.await_iteration()
    assert case.statuses == [128 + TERM]


def test_other_signals_mean_nothing() -> None:
    case = Case()
    case.watch.receive(signal.SIGCHLD)
    case.watch.receive(signal.SIGWINCH)
    assert (case.watch.name, case.statuses) == (None, [])


def test_a_process_not_done_within_the_notice_exits_with_1() -> None:
    case = Case(notice_s=0.01)
    case.watch.await_iteration()
    case.watch.receive(TERM)
    assert case.has_left.wait(10.0)
    assert case.statuses == [1]
    assert "train.exit_signal_save_seconds" in case.exit_graces[0]


def test_who_is_through_within_the_notice_is_left_alone() -> None:
    case = Case(notice_s=0.05)
    case.watch.await_iteration()
    case.watch.receive(TERM)
    case.watch.stop()
    assert not case.has_left.wait(0.2)


def test_a_exit_grace_that_hangs_keeps_nobody() -> None:
    stuck, left = threading.Event(), threading.Event()
    watch = SignalHandler(LONG_S, exit_grace=lambda _: stuck.wait(30.0), leave=lambda _: left.set())
    watch.receive(TERM)
    assert left.is_set()
    assert not stuck.is_set()
    stuck.set()
