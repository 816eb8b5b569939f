"""The times of a run's records: of one clock over hosts and launches, never back, whatever becomes of hosts' clocks."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from tests.unit.metrics.test_run_log import iteration_record, run_log
from trainer.launch.start_times import StartTimes
from trainer.metrics import run_clock as clock_module
from trainer.metrics.jsonl_file import last_recorded_time
from trainer.metrics.launch_log import LaunchOutcome
from trainer.report.goodput import measure_goodput
from trainer.report.history import read_history

DAY_S = 86400.0
CLOCKS = [-DAY_S, 300.0]


def launch(folder: Path, name: str, first: int, seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Log a launch of iterations that last a second each by the clock that nobody sets."""
    now = [1000.0]
    monkeypatch.setattr(clock_module.run_clock, "__kwdefaults__", {"clock": lambda: now[0]})
    log = run_log(folder)
    log.open(first, "", age_s=2.0, launch=name)
    log.started(StartTimes())
    host_time = time.time
    for iteration, ahead_s in enumerate(seconds, start=first + 1):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: host_time() + ahead_s)
        now[0] += 1.0
        log.iteration(iteration_record(iteration))
    monkeypatch.setattr(time, "time", host_time)
    log.ended(first + len(seconds), LaunchOutcome.stopped)
    log.close()


def times_of(folder: Path) -> list[float]:
    return [json.loads(line)["time"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_a_clock_set_within_a_launch_moves_no_record(
    tmp_path: Path, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(tmp_path, "a", 0, [0.0, 0.0, ahead_s, ahead_s], monkeypatch)
    times = times_of(tmp_path)
    assert [after - before for before, after in itertools.pairwise(times)] == pytest.approx([1.0] * 3)
    goodput = measure_goodput(read_history(tmp_path))
    assert goodput is not None
    assert goodput.wall == pytest.approx(6.0)


@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_hosts_of_other_clocks_record_one_time(tmp_path: Path, ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    before = clock_module.file_system_time(tmp_path)
    launch(tmp_path, "a", 0, [0.0, 0.0], monkeypatch)
    launch(tmp_path, "b", 2, [ahead_s, ahead_s], monkeypatch)
    times = times_of(tmp_path)
    assert times == sorted(times)
    assert before - 0.001 <= times[0] < times[-1] < clock_module.file_system_time(tmp_path) + 10.0
    goodput = measure_goodput(read_history(tmp_path))
    assert goodput is not None
    assert 0.0 <= goodput.parts["between launches"] < 10.0


def test_after_a_file_system_clock_went_back_records_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = clock_module.file_system_time
    monkeypatch.setattr(clock_module, "file_system_time", lambda folder: real(folder) + DAY_S)
    launch(tmp_path, "a", 0, [0.0, 0.0], monkeypatch)
    monkeypatch.setattr(clock_module, "file_system_time", real)
    launch(tmp_path, "b", 2, [0.0, 0.0], monkeypatch)
    history = read_history(tmp_path)
    assert [(span.record["launch"], (span.end or {})["launch"]) for span in history.launches] == [
        ("a", "a"),
        ("b", "b"),
    ]
    goodput = measure_goodput(history)
    assert goodput is not None
    assert goodput.wall == pytest.approx(8.0)
    assert goodput.parts["between launches"] == pytest.approx(0.0, abs=1e-6)


def test_the_last_whole_record_has_the_last_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_recorded_time(path) == 0.0
    for text, time_s in [
        ("", 0.0),
        ('{"iteration": 1, "time": 5.5}\n{"iteration": 3, "time": 7}\n{"iteration": 4, "time": 9', 7.0),
        ('{"iteration": 1, "time": 5.5}\n\n', 5.5),
        ('{"iteration": 1, "time": 5.5}\n[]\n', 5.5),
        ('{"iteration": 1, "time": 5.5}\n{"iteration": 4}\n', 0.0),  # of an older version, which recorded no times
        ('{"iteration": 1, "time": true}\n', 0.0),
        ('{"iteration": 1, "time": 1e300}\n', 0.0),
    ]:
        path.write_text(text)
        assert last_recorded_time(path) == time_s, text
