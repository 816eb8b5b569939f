"""The cost of an iteration beside its passes and its step."""

from __future__ import annotations

import json

import pytest
import torch

from scripts.bench import floor


def test_the_floor_of_each_feature_is_the_sum_of_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert floor.main(["--iterations", "2", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["feature"] for row in rows] == list(floor.FEATURES)
    for row in rows:
        assert row["floor"] == pytest.approx(row["iteration"] - sum(row[name] for name in floor.TAKEN_OFF))
        assert row["floor"] == pytest.approx(row["other"] + sum(row[name] for name in floor.PARTS))
