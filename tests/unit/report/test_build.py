from __future__ import annotations

from pathlib import Path

from tests.reported_runs import steady_run, twice_killed_run
from trainer.report.build import report_sections
from trainer.report.history import read_history
from trainer.report.page import PageSection


def sections(folder: Path) -> dict[str, PageSection]:
    runs = [twice_killed_run(folder / "killed"), steady_run(folder / "steady", [2.0, float("nan"), 1.0])]
    return {section.title: section for section in report_sections([(run.name, read_history(run)) for run in runs])}


def test_a_report_has_every_part(tmp_path: Path) -> None:
    assert list(sections(tmp_path)) == [
        "Runs", "Loss", "Differences from killed", "Gradient norm", "Life of killed", "Life of steady", "Goodput",
        "Speed", "What changed between launches of killed", "Machine and versions",
    ]  # fmt: skip


def test_every_chart_has_a_table(tmp_path: Path) -> None:
    charted = [section for section in sections(tmp_path).values() if section.chart is not None]
    assert all(len(section.table) > 1 for section in charted)


def test_changed_settings_stand_side_by_side(tmp_path: Path) -> None:
    table = sections(tmp_path)["What changed between launches of killed"].table
    assert ["train.micro_batch_size", "8", "4", "8"] in table
    assert ["topology.world_size", "1", "2", "1"] in table


def test_a_table_has_the_values_that_are_not_finite(tmp_path: Path) -> None:
    (row,) = (row for row in sections(tmp_path)["Loss"].table if row[0] == "2")
    assert row[2] == "nan"
