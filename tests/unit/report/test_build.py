from __future__ import annotations

import json
import re
from pathlib import Path

from tests.reported_runs import steady_run, twice_killed_run
from trainer.report.build import report_sections
from trainer.report.history import read_history
from trainer.report.page import PageSection


def sections(folder: Path) -> dict[str, PageSection]:
    runs = [twice_killed_run(folder / "killed"), steady_run(folder / "steady", [2.0, float("nan"), 1.0])]
    return {section.title: section for section in report_sections([(run.name, read_history(run)) for run in runs])}


def test_equal_curves_are_both_seen(tmp_path: Path) -> None:
    runs = [steady_run(tmp_path / name, [2.0, 1.5, 1.0]) for name in "abc"]
    found = {section.title: section for section in report_sections([(run.name, read_history(run)) for run in runs])}
    chart = found["Loss"].chart
    assert chart is not None
    text = json.dumps(chart)
    # Of a period of 40 pixels, those of each curve that the next ones leave free.
    dashes = re.findall(r'"line_dash": \[(\d+, \d+)\]', text)
    assert list(dict.fromkeys(dashes))[:2] == ["26, 14", "13, 27"]


def test_a_report_has_every_part_and_a_table_for_each_chart(tmp_path: Path) -> None:
    found = sections(tmp_path)
    assert list(found) == [
        "Runs", "Loss", "Differences from killed", "Gradient norm", "Life of killed", "Life of steady", "Goodput",
        "Speed", "What changed between launches of killed", "Machine and versions",
    ]  # fmt: skip
    assert all(len(section.table) > 1 for section in found.values() if section.chart is not None)
    table = found["What changed between launches of killed"].table
    assert ["train.micro_batch_size", "8", "4", "8"] in table
    assert ["topology.world_size", "1", "2", "1"] in table
    (row,) = (row for row in found["Loss"].table if row[0] == "2")
    assert row[2] == "nan"
