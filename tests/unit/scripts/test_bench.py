"""The harness of the benchmark: sides take turns, ratios are of one round, what fails is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.__main__ import main
from scripts.bench.harness import BenchSide, Goal, report, take_turns


def test_sides_take_turns_and_ratios_are_of_the_same_round() -> None:
    order, values = list[str](), {"ours": [9, 2, 4, 6], "theirs": [9, 1, 4, 2]}

    def measure(name: str) -> dict[str, float]:
        order.append(name)
        return {"load, s": values[name].pop(0)}

    sides = {name: BenchSide(lambda name=name: measure(name)) for name in values}
    late, broken = BenchSide(dict, least_s=60.0), BenchSide(lambda: {}["planted"])
    rows = take_turns({**sides, "late": late, "broken": broken}, 3, warm_up=1, seconds=50.0)
    assert order == ["ours", "theirs", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    for goal, verdict in (
        (Goal("", "ours", "load, s", ["theirs"], 2.0), "met"),
        (Goal("", "ours", "load, s", ["theirs"], 1.9), "MISSED"),
    ):
        assert goal.value(rows) == 2
        assert goal.cells(rows)[-1] == verdict
    assert Goal("", "ours", "load, s", ["theirs", "late"], 2.0).value(rows) is None
    text = "\n".join(report(rows, "theirs"))
    assert "| 4 (2.000) |" in text
    assert "late is left out: begins with 60 s" in text
    assert text.count("broken is left out: KeyError") == 1


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
