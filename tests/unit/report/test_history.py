from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pytest

from reprise.errors import DataError
from tests.reported_runs import BEGAN, LENGTH, steady_run
from trainer.compare.read import METRICS_FILE
from trainer.metrics.launch_log import LAUNCHES
from trainer.report.build import report_sections
from trainer.report.history import read_history
from trainer.report.life import life_of, life_rows


def test_values_of_a_log_keep_their_bits(tmp_path: Path) -> None:
    losses = [0.1 + 0.2, math.nan, math.inf, 1e-310]
    log = read_history(steady_run(tmp_path, losses)).log
    assert [value.hex() for value in log.columns.loss.tolist()] == [loss.hex() for loss in losses]


def test_the_sequence_length_follows_from_speed_and_samples(tmp_path: Path) -> None:
    assert read_history(steady_run(tmp_path, [1.0] * 5)).tokens_per_sample == LENGTH


def test_a_launch_of_an_older_version_is_told_by_its_first_line(tmp_path: Path) -> None:
    (launch,) = read_history(steady_run(tmp_path, [1.0] * 5)).launches
    assert (launch.began, launch.start_seconds, launch.ended) == (BEGAN, 2.0, BEGAN + 7)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    log = steady_run(tmp_path, [1.0, 2.0]) / "metrics.jsonl"
    log.write_text(log.read_text() + '{"iteration": 3, "lo')
    assert read_history(tmp_path).log.columns.iteration.tolist() == [1, 2]


def test_a_malformed_line_is_refused_with_its_file(tmp_path: Path) -> None:
    log = steady_run(tmp_path, [1.0]) / "metrics.jsonl"
    log.write_text(log.read_text() + "no record\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        read_history(tmp_path)


def test_a_log_is_read_in_parts(tmp_path: Path) -> None:
    losses = numpy.arange(10_000) / 7
    assert numpy.array_equal(read_history(steady_run(tmp_path, losses.tolist())).log.columns.loss, losses)


@pytest.mark.parametrize(
    ("file", "members"),
    [
        (METRICS_FILE, {"iteration": math.nan}),
        (METRICS_FILE, {"iteration": 10**300}),
        (METRICS_FILE, {"launch": ["a"]}),
        (METRICS_FILE, {"time": 1e300}),
        (METRICS_FILE, {"event": "save", "written_bytes": math.inf, "time": 1e300}),
        (METRICS_FILE, {"event": "evaluation", "iteration": 10**30, "valid_loss": 1.0}),
        (LAUNCHES, {"launch": {}}),
        (LAUNCHES, {"began": 1e300}),
        (LAUNCHES, {"time": math.nan}),
    ],
)
def test_members_of_other_kinds_stop_no_report(tmp_path: Path, file: str, members: dict[str, object]) -> None:
    line = {"iteration": 1, "loss": 2.0, "resumed": True, "launch": "b", "time": 1.7e9}
    begin = {"event": "begin", "launch": "b", "iteration": 0, "began": 1.7e9, "time": 1.7e9}
    lines = {METRICS_FILE: [line], LAUNCHES: [begin]}
    lines[file].append({**lines[file][0], **members})
    for name, records in lines.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    history = read_history(tmp_path)
    assert history.log.columns.iteration.tolist()[0] == 1
    assert life_rows(life_of(history), most=9)
    assert [section.title for section in report_sections([("run", history)])]
