"""The benchmark of starts, on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.startup import BARE, FRESH, RESUME, measure, report
from tests.harness import TINY


def test_a_fresh_start_and_a_resume_are_measured(tmp_path: Path) -> None:
    found = {(1, side): [measure(side, 1, tmp_path, overrides=TINY)] for side in (BARE, FRESH, RESUME)}
    (fresh,), (resume,) = found[1, FRESH], found[1, RESUME]
    for seconds in (fresh, resume):
        assert 0 < seconds["imports"] < seconds["to the first iteration"] < seconds["to its end"]
    assert fresh["torchrun"] == 0.0
    assert [path.name for path in (tmp_path / "1/checkpoints").glob("iter_*")] != []
    head, _, *rows = report(found)
    assert [row.split("|")[2].strip() for row in rows] == [BARE, FRESH, RESUME]
    assert head.count("|") == rows[0].count("|")


def test_ratios_are_those_of_each_round() -> None:
    bare = [{"to the first iteration": seconds} for seconds in (1.0, 2.0, 4.0)]
    ours = [{"to the first iteration": seconds, "to its end": 8.0} for seconds in (3.0, 4.0, 4.0)]
    *_, row = report({(2, BARE): bare, (2, RESUME): ours})
    assert "| 4.00 (2.00)" in row
    assert "| 8.00 (4.00)" in row
    assert "| -" in row


def test_a_start_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="ended with status 1"):
        measure(FRESH, 1, tmp_path, overrides=["train.seq_length=0"])
