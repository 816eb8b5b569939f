"""`reprise publish`: what it says, and which failures of a tracker end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.messages import Printed
from tests.published_runs import LoggedRun, MemoryTracker, publisher
from trainer.commands.publish import main
from trainer.publish.publisher import publish
from trainer.publish.tracker import RemoteRun, TrackerRow


class AnswerError(OSError):
    """The answer of a server, as requests has it."""


class Server(MemoryTracker):
    """A tracker that answers some requests with a status."""

    def __init__(self, *statuses: int) -> None:
        super().__init__()
        self._statuses = list(statuses)

    def open(self, run: RemoteRun) -> None:
        self._answer()
        super().open(run)

    def send(self, rows: Sequence[TrackerRow]) -> None:
        self._answer()
        super().send(rows)

    def _answer(self) -> None:
        if self._statuses and (status := self._statuses.pop(0)) != 200:
            raise AnswerError(f"{status}: as the server has it")


@pytest.fixture
def run(tmp_path: Path) -> LoggedRun:
    logged = LoggedRun(tmp_path / "run")
    logged.start(0)
    logged.train(1, 3)
    return logged


def published(run: LoggedRun, tracker: Server, pause: Callable[[float], bool] = lambda _: False) -> Exception | None:
    with closing(publisher(run.folder, tracker)) as sender:
        return publish(sender, tracker, pause)


@pytest.mark.parametrize("status", [401, 503])
def test_a_tracker_that_takes_nothing_is_given_up(run: LoggedRun, status: int) -> None:
    for tracker in (Server(status), Server(200, status)):
        error = published(run, tracker)
        assert isinstance(error, AnswerError)
        assert f"{status}: as the server has it" in str(error)
    pauses = list[float]()
    assert isinstance(published(run, Server(*[status] * 9), lambda times: pauses.append(times) is None), AnswerError)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_a_tracker_that_fails_at_first_is_tried_again(run: LoggedRun) -> None:
    pauses = [True, True, False]
    tracker = Server(503, 401)
    assert published(run, tracker, lambda _: pauses.pop(0)) is None
    assert len(tracker.losses(tracker.opened[0])) == 3


def test_a_tracker_that_fails_later_is_waited_for(run: LoggedRun) -> None:
    tracker = Server(200, 200, *[401] * 9)

    def pause(_: float) -> bool:
        if len(tracker.opened) == 1:
            run.train(4, 4)
        return len(tracker.opened) < 2

    assert published(run, tracker, pause) is None
    assert len(tracker.losses(tracker.opened[0])) == 4


def test_a_tracker_that_fails_at_the_end_is_told(run: LoggedRun) -> None:
    tracker = Server(200, 200, 401)

    def pause(_: float) -> bool:
        if len(tracker.opened) == 1:
            run.train(4, 4)
        return not tracker.opened

    assert isinstance(published(run, tracker, pause), AnswerError)


def test_a_publication_says_where(run: LoggedRun, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    tracker = MemoryTracker()
    tracker.place = "memory"
    monkeypatch.setattr("trainer.commands.publish.load_tracker", lambda _: tracker)
    assert main([str(run.folder), "--to", "trackio"]) == 0
    assert capsys.readouterr().out == "the remote run is a1b2c3 in memory\n"
    assert len(tracker.losses("a1b2c3")) == 3
