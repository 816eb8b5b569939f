"""Sinks of metrics: each gets every record, drops what a resume abandons, and ends no run by failing."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from reprise.saving import SaveReport
from reprise.storage import Json
from tests.fakes import iteration_record
from trainer.metrics.figures import figures_of
from trainer.metrics.run_log import RunLog
from trainer.metrics.sink import MetricSink


class MemorySink(MetricSink):
    """A sink of a list, which raises `error` in the calls that `fails_in` names."""

    name = "memory"

    def __init__(self, *fails_in: str, error: Exception | None = None) -> None:
        self.calls = list[str]()
        self.records = list[Json]()
        self.fails_in = fails_in
        self.error = error or RuntimeError("no service")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails_in:
            raise self.error

    def start(self, folder: Path, iteration: int) -> None:
        self._call("start")

    def write(self, record: Json) -> None:
        self._call("write")
        self.records.append(record)

    def close(self) -> None:
        self._call("close")


@pytest.fixture
def sink() -> MemorySink:
    return MemorySink()


def run_log(folder: Path, sink: MemorySink) -> RunLog:
    log = RunLog(folder, train_iters=10, mfu_scale=None, sinks=[sink])
    log.open(0, "a: 1\n")
    return log


def written(folder: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_sink_gets_every_record(tmp_path: Path, sink: MemorySink) -> None:
    log = run_log(tmp_path, sink)
    log.iteration(iteration_record(1))
    log.evaluation(1, 2.5, None)
    log.note(1, "spike", {"figure": "the loss"}, "a spike")
    log.save(SaveReport(1, tmp_path, 10, 0.5), slowdown_s=0.0)
    log.sync()
    log.close()
    assert sink.calls == ["start", *["write"] * 4, "close"]
    named = [figures_of(record) for record in sink.records]
    assert named[0][0]["train/loss"] == 2.5
    assert named[1] == ({"valid/loss": 2.5}, {})
    assert named[2] == ({}, {"spike/figure": "the loss"})
    assert named[3][0]["save/written_bytes"] == 10


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("start", ImportError("no library")),
        *((call, OSError("no route")) for call in ("write", "close")),
    ],
)
def test_a_sink_that_fails_ends_no_run_and_is_logged_once(
    tmp_path: Path, sink: MemorySink, caplog: pytest.LogCaptureFixture, call: str, error: Exception
) -> None:
    sink.fails_in, sink.error = (call,), error
    log = run_log(tmp_path, sink)
    for iteration in (1, 2, 3):
        log.iteration(iteration_record(iteration))
        log.sync()
    log.close()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [f"Metrics could not be written to memory, and the run continues: {error!r}"]
    assert written(tmp_path) == [1, 2, 3]
    assert ("write" in sink.calls) == (call != "start")  # a sink that did not start is not called again


def test_an_interrupt_in_a_sink_is_no_failure_of_it(tmp_path: Path, sink: MemorySink) -> None:
    log = run_log(tmp_path, sink)
    sink.fails_in, sink.error = ("write",), KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        log.save(SaveReport(1, tmp_path, 10, 0.5), slowdown_s=0.0)
    assert written(tmp_path) == []  # a save is in the sinks before the lines have it
