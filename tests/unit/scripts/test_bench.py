"""The harness of the benchmark: sides take turns, ratios are of one round, what fails is left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from scripts.bench.__main__ import main
from scripts.bench.harness import Goal, apart, report, take_turns


def test_sides_take_turns_and_ratios_are_of_the_same_round() -> None:
    order, values = list[str](), {"ours": [9, 2, 4, 6], "theirs": [9, 1, 4, 2]}

    def measure(name: str) -> dict[str, float]:
        order.append(name)
        return {"load, s": values[name].pop(0)}

    def fail() -> dict[str, float]:
        raise OSError("planted")

    rows = take_turns({**{name: partial(measure, name) for name in values}, "broken": fail}, 3, warm_up=1)
    assert order == ["ours", "theirs", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    for goal, verdict in (
        (Goal("", "ours", "load, s", "theirs", 2.0), "met"),
        (Goal("", "ours", "load, s", "theirs", 1.9), "MISSED"),
    ):
        assert goal.value(rows) == 2
        assert goal.cells(rows)[-1] == verdict
    assert Goal("", "ours", "load, s", "broken", 2.0).value(rows) is None
    text = "\n".join(report(rows, "theirs"))
    assert "| 4 (2.000) |" in text
    assert text.count("broken is left out: OSError") == 1


def sleeper(seconds: float) -> Callable[[], float]:
    """Return a call that takes so many seconds; a negative number ends the process."""
    if seconds < 0:
        raise SystemExit(3)
    return partial(time.sleep, seconds)


@pytest.mark.slow
def test_a_side_apart_is_left_out_if_it_ends_or_takes_too_long() -> None:
    for seconds, words in ((-1.0, "its process ended with status 3"), (60.0, "took more than 5.0 s")):
        with apart(sleeper, seconds, timeout_s=5.0) as call:
            (row,) = take_turns({"side": call}, 2)
        assert words in row["left out"]


@pytest.mark.slow
def test_the_bytes_that_are_saved_are_loaded_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["raw write + fsync", "ours, inline", "ours, background", "DCP async_save, thread", "torch.save"]
    arguments = ["--size", "gpt2_tiny", "--rounds", "1", "--only", "ways", "--folder", str(tmp_path)]
    assert main(["checkpoint", *arguments, "--rows", ";".join(names)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [
        [cell.strip() for cell in line.split("|")] for line in lines if line.startswith(tuple(f"| {n} " for n in names))
    ]
    assert len(rows) == len(names)
    assert all(row[2] and row[-2] for row in rows), "no figure is missing"
    assert list(tmp_path.iterdir()) == []
