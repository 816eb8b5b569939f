"""The sections of a report: what each chart and table has of the runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.reported_runs import event, steady_run, twice_killed_run, write
from trainer.compare.curves import compare, tolerance_of
from trainer.compare.read import read_curve
from trainer.report.build import report_sections
from trainer.report.history import read_history
from trainer.report.page import PageSection

BASE = [1.0, 2.0, math.nan, math.inf, 5.0]


def sections(*runs: Path) -> dict[str, PageSection]:
    return {section.title: section for section in report_sections([(run.name, read_history(run)) for run in runs])}


def test_equal_curves_are_both_seen(tmp_path: Path) -> None:
    found = sections(*(steady_run(tmp_path / name, [2.0, 1.5, 1.0]) for name in "abc"))
    # Of a period of 40 pixels, those of each curve that the next ones leave free.
    dashes = re.findall(r'"line_dash": \[(\d+, \d+)\]', json.dumps(found["Loss"].chart))
    assert list(dict.fromkeys(dashes))[:2] == ["26, 14", "13, 27"]
    assert not (found["Differences from a"].chart or {})["isLog"]  # where 0 has no place


def test_a_report_has_every_part(tmp_path: Path) -> None:
    killed = twice_killed_run(tmp_path / "killed")
    write(killed / "follow.jsonl", [{"iteration": 100, "metric": "accuracy", "value": 0.5}])
    found = sections(killed, steady_run(tmp_path / "steady", [2.0, float("nan"), 1.0]))
    assert list(found) == [
        "Runs", "Loss", "Differences from killed", "Measured by followers", "Gradient norm", "Life of killed",
        "Life of steady", "Goodput", "Speed", "Launches: machines, versions, and settings that differ",
    ]  # fmt: skip
    assert (found["Differences from killed"].chart or {})["isLog"]
    table = [*found.values()][-1].table
    assert ["train.micro_batch_size", "8", "4", "8", "-"] in table
    assert ["topology.world_size", "1", "2", "1", "-"] in table
    assert found["Runs"].table[1][:3] == ["killed", "500", "0.200218"]
    assert [row[0] for row in found["Goodput"].table][:2] == ["part", "trained forward"]


@pytest.mark.parametrize(
    "losses", [BASE, [1.0, 2.0 + 1e-7, *BASE[2:]], [1.0, 2.5, *BASE[2:]], [1.0, 2.0, 3.0, *BASE[3:]], [1.0, 2.0]]
)
@pytest.mark.parametrize("valid_loss", [1.0, 1.5])
def test_the_verdict_is_that_of_compare_loss(tmp_path: Path, losses: list[float], valid_loss: float) -> None:
    base, test = steady_run(tmp_path / "base", BASE), steady_run(tmp_path / "test", losses)
    for folder, loss in ((base, 1.0), (test, valid_loss)):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(event("evaluation", 2, 9.0, valid_loss=loss, valid_loss_hex=loss.hex())) + "\n")
    curves = read_curve(base), read_curve(test)
    verdict = compare(*curves, tolerance=tolerance_of(*curves)).verdict
    assert sections(base, test)["Differences from base"].notes == [f"test: {verdict}"]
