"""`reprise publish`: what it says, and which failures of a tracker end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from reprise.errors import DataError
from tests.messages import Printed, refused
from tests.published_runs import LoggedRun, MemoryTracker, publisher
from trainer.commands.publish import main
from trainer.publish.publisher import publish
from trainer.publish.tracker import RemoteRun, TrackerRow


class AnswerError(OSError):
    """The answer of a server, as requests has it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}: as the server has it")
        self.response = SimpleNamespace(status_code=status)


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
            raise AnswerError(status)


@pytest.fixture
def run(tmp_path: Path) -> LoggedRun:
    logged = LoggedRun(tmp_path / "run")
    logged.start(0)
    logged.train(1, 3)
    return logged


def published(run: LoggedRun, tracker: Server, pause: Callable[[float], bool] = lambda _: False) -> Exception | None:
    with closing(publisher(run.folder, tracker)) as sender:
        return publish(sender, tracker, pause)


@pytest.mark.parametrize("status", [401, 404])
def test_a_tracker_that_refuses_ends_a_publication(run: LoggedRun, status: int) -> None:
    for tracker in (Server(status), Server(200, status)):
        with refused(DataError, f"{status}: as the server has it"):
            published(run, tracker)
    with refused(DataError, f"{status}: as the server has it"):
        published(run, Server(status), lambda _: True)


@pytest.mark.parametrize("status", [408, 503])
def test_a_tracker_that_is_too_busy_is_tried_again(run: LoggedRun, status: int) -> None:
    tracker = Server(status)
    assert isinstance(published(run, tracker), AnswerError)
    pauses = [True, False]
    tracker = Server(status)
    assert published(run, tracker, lambda _: pauses.pop(0)) is None
    assert len(tracker.losses(tracker.opened[0])) == 3


def test_a_tracker_that_refuses_later_is_waited_for(run: LoggedRun) -> None:
    tracker = Server(200, 200, 401)

    def pause(_: float) -> bool:
        if len(tracker.opened) == 1:
            run.train(4, 4)
        return len(tracker.opened) < 2

    assert published(run, tracker, pause) is None
    assert len(tracker.losses(tracker.opened[0])) == 4


def test_a_tracker_that_refuses_the_end_is_told(run: LoggedRun) -> None:
    tracker = Server(200, 200, 401)

    def pause(_: float) -> bool:
        if len(tracker.opened) == 1:
            run.train(4, 4)
        return not tracker.opened

    with refused(DataError, "401: as the server has it"):
        published(run, tracker, pause)


def test_a_publication_to_tensorboard_says_where(run: LoggedRun, capsys: Printed) -> None:
    assert main([str(run.folder), "--to", "tensorboard"]) == 0
    said = capsys.readouterr().out
    assert f"in {run.folder / 'publish' / 'tensorboard'}" in said
    assert list(Path(said.split(" in ")[-1].strip()).glob("events.out.tfevents.*"))
