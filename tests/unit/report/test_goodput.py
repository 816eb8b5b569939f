from __future__ import annotations

from pathlib import Path

import pytest

from tests.reported_runs import BEGAN, event, line, write
from trainer.report.goodput import measure_goodput
from trainer.report.history import read_history

START = {"start": {"seconds": 3.0}}


def killed_run(folder: Path) -> Path:
    """Write a run of two launches, the first killed after iteration 4, beyond the save of 2, and return its folder."""
    kept = [
        line(1, 1.0, 4.0, launch="a", data_seconds=0.25, **START),
        line(2, 1.0, 5.0),
        event("evaluation", 2, 7.0, valid_loss=1.0),
        event("save", 2, 8.0, seconds=1.0, blocked_seconds=0.5),
        line(3, 1.0, 34.0, launch="b", resumed=True, **START),
        line(4, 1.0, 35.0),
        event("evaluation", 4, 36.0, valid_loss=0.5),
        event("save", 4, 38.0, seconds=1.0, blocked_seconds=0.5),
    ]
    lost = [line(3, 1.0, 8.5, checkpoint_seconds=0.5), line(4, 1.0, 9.5)]
    write(folder / "metrics.jsonl", kept)
    write(folder / "metrics.abandoned-1.jsonl", lost)
    begin, end = ({"event": name, "iteration": 0} for name in ("begin", "end"))
    launches = [
        {**begin, "launch": "a", "began": BEGAN, "time": BEGAN + 2.5},
        {**begin, "launch": "b", "began": BEGAN + 30, "time": BEGAN + 32, "iteration": 2},
        {**end, "launch": "b", "time": BEGAN + 40, "outcome": "finished"},
    ]
    write(folder / "launches.jsonl", launches)
    return folder


def test_the_parts_of_a_killed_run_add_up_to_the_wall_time(tmp_path: Path) -> None:
    goodput = measure_goodput(read_history(killed_run(tmp_path)))
    assert goodput is not None
    assert goodput.wall == 40.0
    assert goodput.parts == pytest.approx(
        {
            "trained forward": 4.0 - 0.25,
            "repeated": 2.0,
            "waited for data": 0.25,
            "blocked by saves": 0.5,  # of a lost iteration
            "evaluated": 2.0 + 1.0,
            "started": 6.0,
            "between launches": 20.5,
            "other": 4.0,  # from the last evaluation to the end, with a save
        }
    )


def test_a_launch_killed_in_its_start_counts_as_a_start(tmp_path: Path) -> None:
    folder = killed_run(tmp_path)
    record = f'{{"event": "begin", "launch": "c", "iteration": 4, "began": {BEGAN + 50}, "time": {BEGAN + 51.5}}}\n'
    with (folder / "launches.jsonl").open("a") as file:
        file.write(record)
    goodput = measure_goodput(read_history(folder))
    assert goodput is not None
    assert (goodput.wall, goodput.parts["started"], goodput.parts["between launches"]) == pytest.approx(
        (51.5, 7.5, 30.5)
    )
