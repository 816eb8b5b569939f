"""What the doctor says of a machine and a folder that can do all, and of ones that cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from reprise.storage import Files
from tests.messages import Printed
from trainer.commands import doctor
from trainer.doctor import looks


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "_SAVED_BYTES", 1 << 20)


def verdicts(text: str) -> dict[str, str]:
    return {line[9:37].strip(): line[:8].strip() for line in text.splitlines()}


def test_all_is_well_here_and_nothing_is_left(tmp_path: Path, capsys: Printed) -> None:
    assert doctor.main([str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    found = verdicts(text)
    assert {"torch 2.11 or newer", "backend gloo", "free space", "a checkpoint"} <= {
        what for what, verdict in found.items() if verdict == looks.FINE
    }
    assert "GB/s" in text
    assert list(tmp_path.iterdir()) == []


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def nothing(*_: object) -> None:
    return None


@pytest.mark.parametrize(
    ("call", "answer", "what", "verdict"),
    [
        ("rename", refuse, "a checkpoint", looks.BAD),
        ("sync_folder", refuse, "a checkpoint", looks.BAD),
        ("free_bytes", lambda *_: 0, "free space", looks.BAD),
        ("free_bytes", nothing, "free space", looks.WORSE),
    ],
)
def test_what_a_file_system_lacks_is_named(
    tmp_path: Path,
    call: str,
    answer: Callable[..., int | None],
    what: str,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Printed,
) -> None:
    monkeypatch.setattr(Files, call, answer)
    assert doctor.main([str(tmp_path)]) == (verdict == looks.BAD)
    text = capsys.readouterr().out
    assert verdicts(text)[what] == verdict
    assert ("errno 1" in text) == (answer is refuse)
    assert list(tmp_path.iterdir()) == []


def test_the_check_removes_its_own_files_and_no_others(tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "empty").mkdir()
    assert doctor.main([str(tmp_path / "there" / "a" / "b" / "c")]) == 0
    assert doctor.main([str(tmp_path / "there" / "empty")]) == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "empty"]
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "new" / ".." / "file" / "x"):
        assert doctor.main([str(folder)]) == 1
        assert verdicts(capsys.readouterr().out)["a folder can be created"] == looks.BAD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_a_folder_as_a_store_stays_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "kept").mkdir()
    assert doctor.main([f"file://{tmp_path}/kept"]) == 0
    assert verdicts(capsys.readouterr().out)["conditional creation"] == looks.FINE
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]
