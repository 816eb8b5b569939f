"""What the doctor says of a machine and a folder that can do all, and of ones that cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trainer import doctor
from trainer.checkpoint.files import Files


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SPEED_BYTES", 1 << 20)


def verdicts(text: str) -> dict[str, str]:
    return {line[9:37].strip(): line[:8].strip() for line in text.splitlines()}


def test_all_is_well_here_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    found = verdicts(text)
    assert {"torch 2.11 or newer", "backend gloo", "room", "atomic rename", "lock"} <= {
        what for what, verdict in found.items() if verdict == doctor.FINE
    }
    assert "GB/s" in text
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "what"),
    [("rename", "atomic rename"), ("sync_folder", "atomic rename"), ("reserve", "blocks can be reserved")],
)
def test_what_a_file_system_refuses_is_named(
    tmp_path: Path, kind: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Files, kind, refuse)
    assert doctor.main([str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert verdicts(text)[what] == doctor.BAD
    assert "Operation not permitted (errno 1)" in text
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_writes_is_slower_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Files, "open_direct", lambda *_: None)
    assert doctor.main([str(tmp_path)]) == 0
    assert verdicts(capsys.readouterr().out)["O_DIRECT, and speed"] == doctor.WORSE


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert doctor.main([str(tmp_path / "file")]) == 1
    assert "Not a directory" in capsys.readouterr().out
