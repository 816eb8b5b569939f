"""The end of a mirror."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from reprise.stores import mirror as mirror_module
from reprise.stores.mirror import MirrorProcess, mirror_rule


def test_an_end_at_the_start_of_a_pass_is_not_slept_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class EndsFirst(threading.Event):
        def clear(self) -> None:
            mirror.end()
            super().clear()

        def wait(self, timeout: float | None = None) -> bool:
            raise AssertionError(f"the mirror sleeps for {timeout} s")

    monkeypatch.setattr(mirror_module.threading, "Event", EndsFirst)
    folder, rule = tmp_path / "run", mirror_rule(f"file://{tmp_path}/store", interval=0, keep=0)
    folder.mkdir()
    mirror = MirrorProcess(folder, rule, attached=False)
    monkeypatch.undo()
    mirror.follow()
