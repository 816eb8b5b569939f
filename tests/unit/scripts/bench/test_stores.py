"""The benchmark of stores, with a folder as the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import stores


@pytest.mark.nightly
def test_every_side_is_measured_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores.main([f"file://{tmp_path}/bench", "--megabytes", "13", "--rounds", "1"])
    table = capsys.readouterr().out
    for side in ("bare upload", "mirror", "bare download", "load"):
        assert f"| {side} " in table
    assert "bytes in the store / bytes on the disk: 1.00000" in table
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
