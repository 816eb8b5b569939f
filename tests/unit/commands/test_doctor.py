"""What the doctor says of a machine and a folder that can do all, and of ones that cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from reprise.files import Files
from trainer.commands import doctor


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SPEED_BYTES", 1 << 20)


def verdicts(text: str) -> dict[str, str]:
    return {line[9:37].strip(): line[:8].strip() for line in text.splitlines()}


def test_all_is_well_here_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    found = verdicts(text)
    assert {"torch 2.11 or newer", "backend gloo", "free space", "atomic rename", "lock"} <= {
        what for what, verdict in found.items() if verdict == doctor.FINE
    }
    assert "GB/s" in text
    kernels = next(line for line in text.splitlines() if line[9:].startswith("kernels"))
    assert torch.backends.cpu.get_cpu_capability() in kernels
    assert "processor" in found
    assert list(tmp_path.iterdir()) == []


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


def test_a_file_system_without_direct_writes_is_called_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Files, "open_direct", lambda *_: None)
    assert doctor.main([str(tmp_path)]) == 0
    assert verdicts(capsys.readouterr().out)["O_DIRECT, and speed"] == doctor.WORSE


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert doctor.main([str(tmp_path / "file")]) == 1
    assert "Not a directory" in capsys.readouterr().out


def test_the_check_removes_its_own_files_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "empty").mkdir()
    assert doctor.main([str(tmp_path / "there" / "a" / "b" / "c")]) == 0
    assert doctor.main([str(tmp_path / "there" / "empty")]) == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "empty"]
    (tmp_path / "file").touch()
    assert doctor.main([str(tmp_path / "new" / ".." / "file" / "x")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_a_folder_that_others_use_meanwhile_stays(tmp_path: Path) -> None:
    looks = doctor.folder(tmp_path / "runs" / "new")
    next(looks)
    (tmp_path / "runs" / "other").touch()
    for _ in looks:
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "other"]


@pytest.mark.parametrize(
    ("figures", "verdict", "said"),
    [
        ({"free_inodes": 0}, doctor.BAD, "no inodes left: no file can be made"),
        ({"free_bytes": None}, doctor.WORSE, "the file system does not say"),
    ],
)
def test_room_that_is_no_number_of_bytes_is_told(
    tmp_path: Path,
    figures: dict[str, int | None],
    verdict: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, figure in figures.items():
        monkeypatch.setattr(Files, name, lambda *_, figure=figure: figure)
    doctor.main([str(tmp_path)])
    text = capsys.readouterr().out
    assert verdicts(text)["free space"] == verdict
    assert said in text
