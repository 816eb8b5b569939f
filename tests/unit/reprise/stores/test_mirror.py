"""The process of a mirror, and what it is told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from reprise.stores.mirror import Mirror, follow, mirror_rule
from reprise.stores.mirror_pass import MirrorPass
from tests.fakes import JOIN_S
from tests.stores.saving import committed, save


@pytest.mark.parametrize("words", [["wake", "finish"], ["finish"]])
def test_a_mirror_goes_on_after_its_process_is_killed(tmp_path: Path, words: list[str]) -> None:
    save(tmp_path / "run", [5])
    mirror = Mirror(tmp_path / "run", mirror_rule(f"file://{tmp_path}/store", interval=0, keep=0))
    killed = mirror.process
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(JOIN_S)
    if "wake" in words:
        mirror.wake()
        assert mirror.process is not killed
    assert mirror.finish(JOIN_S) == []
    assert committed(tmp_path / "store") == ["iter_0000005"]


def test_a_process_whose_program_is_gone_ends_at_once(tmp_path: Path) -> None:
    save(tmp_path / "run", [5])
    mirror = Mirror(tmp_path / "run", mirror_rule(f"file://{tmp_path}/store", interval=10, keep=0))
    assert mirror.process.stdin is not None
    mirror.process.stdin.close()
    assert mirror.process.wait(JOIN_S) != 0
    assert mirror.missing() == ["5"]
    assert committed(tmp_path / "store") == []


def test_a_mirror_that_cannot_be_restarted_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    save(tmp_path / "run", [5])
    mirror = Mirror(tmp_path / "run", mirror_rule(f"file://{tmp_path}/store", interval=10, keep=0))
    mirror.process.kill()
    mirror.process.wait(JOIN_S)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        mirror.wake()
        assert mirror.finish(JOIN_S) == ["5"]
    assert "the mirror cannot be restarted: [Errno 12]" in caplog.text


def test_a_store_away_for_hours_is_tried_again_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finishing, tries = threading.Event(), list[bool]()
    passes = MirrorPass.__new__(MirrorPass)

    def fail(*, at_end: bool) -> bool:
        tries.append(at_end)
        raise OSError(errno.EIO, "away")

    def wait(_: float) -> bool:
        if len(tries) == 20:
            finishing.set()
        return finishing.is_set()

    monkeypatch.setattr(finishing, "wait", wait)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(passes, "run", fail)
    with pytest.raises(OSError, match="away"):
        follow(passes, tmp_path, finishing)
    assert tries.count(False) == 20
    assert tries.count(True) > 5
