"""The process beside a run that sends its log to a tracker."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.fakes import iteration_record
from tests.messages import says
from tests.published_runs import fake_trackio, tracked
from trainer.config.logging import LoggingSection, logging_problems
from trainer.metrics.publish_sink import PublishSink
from trainer.metrics.run_log import RunLog

DEADLINE_S = 100


@pytest.fixture(autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the tracker's folder."""
    folder = tmp_path_factory.mktemp("store")
    for name, value in fake_trackio(folder).items():
        monkeypatch.setenv(name, value)
    return folder


def start(folder: Path) -> PublishSink:
    sink = PublishSink("trackio")
    sink.start(folder, 0)
    return sink


def test_it_sends_the_log_and_ends_after_the_run(tmp_path: Path, store: Path) -> None:
    log = RunLog(tmp_path, train_iters=9, mfu_scale=None)
    log.open(0, "train: {}")
    sink = start(tmp_path)
    for iteration in range(1, 10):
        log.iteration(iteration_record(iteration))
    log.close()
    process = sink._process
    sink.close()
    assert process is not None
    assert process.wait(DEADLINE_S) == 0, (tmp_path / "publish/trackio/publish.log").read_text()
    assert list(tracked(store)["train/loss"]) == list(range(1, 10))


def test_its_end_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = start(tmp_path)
    assert sink._process is not None
    sink._process.kill()
    sink._process.wait(DEADLINE_S)
    with caplog.at_level(logging.WARNING):
        for iteration in (1, 2):
            sink.write({"iteration": iteration})
        sink.close()
    (record,) = caplog.records
    assert "has ended with status -9, and the run continues without it" in record.getMessage()


def test_an_unknown_tracker_is_refused() -> None:
    assert not [*logging_problems(LoggingSection(publish="mlflow"))]
    (problem,) = logging_problems(LoggingSection(publish="mflow"))
    says(problem)
