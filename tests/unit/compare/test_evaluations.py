"""The metrics that followers have recorded of a run: whose lines count, and their names."""

from __future__ import annotations

import json
from pathlib import Path

from reprise.errors import DataError
from tests.messages import refused
from trainer.compare.evaluations import read_evaluations

A, B, C = ({"id": name, "began_at": began_at} for name, began_at in (("a", -1), ("b", 4), ("c", 2)))


def write_lines(path: Path, *records: dict[str, object]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def line(iteration: int, value: float | None, *branches: dict[str, object], metric: str = "acc") -> dict[str, object]:
    return {"iteration": iteration, "branches": list(branches), "metric": metric, "value": value}


def test_metrics_have_the_name_of_their_follower(tmp_path: Path) -> None:
    assert read_evaluations(tmp_path) == {}
    write_lines(tmp_path / "follow.jsonl", line(1, 0.25), line(2, None), line(3, 0.5), {"iteration": 4})
    write_lines(tmp_path / "follow.hard.jsonl", line(2, 0.125))
    expected = {"hard: acc": {2: 0.125}, "acc": {1: 0.25, 3: 0.5}}
    (tmp_path / "followers.jsonl").write_text("not of a follower\n")
    assert read_evaluations(tmp_path) == expected


def test_lines_of_an_abandoned_branch_are_left_out(tmp_path: Path) -> None:
    """The run goes on from 4 on branch b, and later from 2 on branch c. The order of the lines means nothing."""
    records = [line(n, n / 10, A) for n in (2, 4, 6)] + [line(n, n + 0.5, A, B) for n in (5, 6)]
    write_lines(tmp_path / "follow.jsonl", *records)
    assert read_evaluations(tmp_path) == {"acc": {2: 0.2, 4: 0.4, 5: 5.5, 6: 6.5}}
    write_lines(tmp_path / "follow.jsonl", line(3, 9.0, A, B, C), *records)
    assert read_evaluations(tmp_path) == {"acc": {2: 0.2, 3: 9.0}}


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "follow.jsonl", {"metric": "acc", "value": 1.0})
    with refused(DataError, "follow.jsonl, line 1"):
        read_evaluations(tmp_path)
