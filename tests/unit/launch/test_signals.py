"""What a signal means, by when it comes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.crash.moments import await_true
from tests.fakes import JOIN_S, Clock
from trainer.launch import signals
from trainer.launch.signals import SIGNALS, SignalHandler

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
LONG_S = 3600.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(signals, "time", clock := Clock())
    return clock


@pytest.fixture(autouse=True)
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the statuses with which this process would have ended."""
    statuses = list[int]()
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


class Case:
    """A handler and its reports."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        self.handler = SignalHandler(self.reports.append)


@pytest.fixture
def training() -> Case:
    """Return the handler of a run that trains."""
    case = Case()
    case.handler.await_iteration()
    return case


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_wish(
    number: signal.Signals, training: Case, clock: Clock, statuses: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert training.handler.name is None
    for now in (100.0, 100.1, 101.9):  # within two seconds it is the same wish
        clock.now = now
        training.handler.receive(number)
    assert (training.handler.name, statuses, training.reports) == (number.name, [], [])
    answer = f"{number.name}: the run ends after this iteration; repeat it after 2 s to quit now"
    await_true(lambda: caplog.messages.count(answer) == 1)
    early = Case()
    early.handler.receive(number)
    assert statuses == [128 + number]
    assert early.reports == [f"received {number.name} before the first iteration"]


def test_terminals_and_schedulers_ask_to_stop(training: Case, statuses: list[int]) -> None:
    training.handler.receive(signal.SIGCHLD)
    training.handler.receive(signal.SIGWINCH)  # which mean nothing
    assert (training.handler.name, statuses) == (None, [])
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    assert {getattr(signal, name) for name in names} == {*SIGNALS}


@pytest.mark.parametrize("second", SIGNALS)
def test_a_signal_two_seconds_later_is_an_order(
    second: signal.Signals, training: Case, clock: Clock, statuses: list[int]
) -> None:
    training.handler.receive(USR1)
    clock.now += 2.0
    training.handler.receive(second)
    assert statuses == [128 + second]
    assert training.reports == [f"received {second.name} after SIGUSR1"]
    assert training.handler.name == "SIGUSR1"


def test_a_signal_just_before_the_first_iteration_counts(clock: Clock, statuses: list[int]) -> None:
    case = Case()
    case.handler._first = int(TERM), clock.now  # taken, and not yet judged
    case.handler.await_iteration()
    assert statuses == [128 + TERM]


@pytest.fixture
def hangup() -> Iterator[None]:
    """Restore what the process does at SIGHUP and the other signals."""
    before = {number: signal.getsignal(number) for number in {*SIGNALS, signal.SIGHUP}}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_hangup_asks_to_stop_unless_nohup_ignores_it(is_ignored: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    case = Case()
    case.handler.await_iteration()
    case.handler.start()
    try:
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == is_ignored
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL, "which would end this process"
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        await_true(lambda: case.handler.name is not None)
        assert case.handler.name == ("SIGUSR1" if is_ignored else "SIGHUP")
    finally:
        case.handler.stop()


def test_a_process_that_ends_by_an_error_is_silent_at_a_signal(
    statuses: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case()
    case.handler.leave_within(LONG_S)
    case.handler.receive(TERM)
    assert (statuses, case.reports) == ([1], [])
    assert capsys.readouterr() == ("", "")


def test_a_report_that_hangs_keeps_nobody(statuses: list[int]) -> None:
    stuck = threading.Event()
    SignalHandler(lambda _: stuck.wait(JOIN_S)).receive(TERM)
    assert statuses == [128 + TERM]
    assert not stuck.is_set()
    stuck.set()
