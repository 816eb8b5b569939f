"""The benchmark of ways to write columns runs and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import columns


def test_ways_to_write_columns_are_measured_beside_a_raw_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns.main(["--mebibytes", "1", "--rounds", "1", "--runs", "2048", "--folder", str(tmp_path)])
    shown = capsys.readouterr().out
    for way in (columns.DIRECT, columns.SHARED, columns.MAPPED, columns.RUNS):
        assert way in shown
    assert list(tmp_path.iterdir()) == []
