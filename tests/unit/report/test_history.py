from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pytest

from reprise.errors import DataError
from tests.messages import refused
from tests.reported_runs import BEGAN, LENGTH, SAMPLES, steady_run
from trainer.metrics.json_lines import LATEST, METRICS
from trainer.metrics.jsonl_file import cut_after
from trainer.metrics.launch_log import LAUNCHES
from trainer.report.build import report_sections
from trainer.report.history import read_history
from trainer.report.life import life_of, life_rows


def test_values_of_a_log_keep_their_bits(tmp_path: Path) -> None:
    losses = [0.1 + 0.2, math.nan, math.inf, 1e-310, 1.0]
    log = steady_run(tmp_path, losses) / METRICS
    text = log.read_text()
    log.write_text(text + '{"iteration": 3, "lo')  # a torn line
    history = read_history(tmp_path)
    assert [value.hex() for value in history.log.columns.values[0].tolist()] == [loss.hex() for loss in losses]
    assert history.tokens.tolist() == [SAMPLES * LENGTH * n for n in range(1, 6)]
    (launch,) = history.launches
    assert (launch.began, launch.start_seconds, launch.ended) == (BEGAN, 2.0, BEGAN + 7)
    log.write_text(text + "no record\n")
    with refused(DataError, METRICS):
        read_history(tmp_path)


def test_damaged_lines_are_left_out_where_a_cut_moved_them(tmp_path: Path) -> None:
    log = steady_run(tmp_path, [1.0, 2.0, 3.0]) / METRICS
    first, second, third = log.read_text().splitlines(keepends=True)
    log.write_text(f'{first}{second}{{"iteration": 3, "lo\n{third}')
    cut_after(log, 1)
    (abandoned,) = read_history(tmp_path).abandoned
    assert (abandoned.columns.iterations.tolist(), abandoned.columns.lines.tolist()) == ([2, 3], [1, 3])


def test_a_log_is_read_in_parts(tmp_path: Path) -> None:
    losses = numpy.arange(10_000) / 7
    assert numpy.array_equal(read_history(steady_run(tmp_path, losses.tolist())).log.columns.values[0], losses)


@pytest.mark.parametrize(
    ("file", "members"),
    [
        (METRICS, {"launch": ["a"]}),
        (METRICS, {"time": 1e299}),
        (METRICS, {"event": "save", "written_bytes": math.inf, "time": 1e300}),
        (LAUNCHES, {"launch": {}}),
        (LAUNCHES, {"began": 1e300}),
    ],
)
def test_members_of_other_kinds_stop_no_report(tmp_path: Path, file: str, members: dict[str, object]) -> None:
    line = {"iteration": 1, "loss": 2.0, "resumed": True, "launch": "b", "time": 1.7e9}
    begin = {"event": "begin", "launch": "b", "iteration": 0, "began": 1.7e9, "time": 1.7e9}
    lines = {METRICS: [line], LAUNCHES: [begin]}
    lines[file].append({**lines[file][0], **members})
    for name, records in lines.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    history = read_history(tmp_path)
    assert history.log.columns.iterations.tolist()[0] == 1
    assert all(launch.ended <= LATEST for launch in history.launches)
    assert life_rows(life_of(history), most=9)
    assert [section.title for section in report_sections([("run", history)])]
