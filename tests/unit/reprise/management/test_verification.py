"""`reprise.verify`: every byte is read. `commands/test_checkpoint.py` has the damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise import CheckpointStatus, verify
from reprise.storage.files import Files
from tests.unit.reprise.management.test_listing import save


def test_every_byte_is_read_and_reported(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    results = verify(save(tmp_path, 1, 2), progress=lambda *call: calls.append(call))
    assert [(r.iteration, r.status, r.checked_bytes) for r in results] == [(1, "whole", 32), (2, "whole", 32)]
    assert calls == sorted(calls)
    assert {("iter_0000001", 0, 32), ("iter_0000001", 32, 32), ("iter_0000002", 32, 32)} <= {*calls}


def test_what_cannot_be_read_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Files, "open_for_reading", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        (result,) = verify(folder)
    assert result.status is CheckpointStatus.UNREADABLE
    assert verify(folder)[0].status is CheckpointStatus.WHOLE
