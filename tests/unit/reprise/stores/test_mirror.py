"""The ends of a mirror and of its thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from reprise.stores import mirror as mirror_module
from reprise.stores.mirror import Mirror, mirror_rule
from reprise.stores.mirror_pass import MirrorPass
from tests.fakes import JOIN_S


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
    mirror = Mirror(folder, rule, attached=False)
    monkeypatch.undo()
    mirror.follow()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("words", [["wake", "finish"], ["finish"]])
def test_a_mirror_goes_on_after_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    defects = [True]

    def run(_passes: MirrorPass, *, at_end: bool = False) -> bool:
        if defects:
            defects.pop()
            raise RuntimeError("can't start new thread")
        return at_end

    monkeypatch.setattr(MirrorPass, "run", run)
    (tmp_path / "run").mkdir()
    mirror = Mirror(tmp_path / "run", mirror_rule(f"file://{tmp_path}/store", interval=0, keep=0))
    mirror._thread.join(JOIN_S)
    if "wake" in words:
        mirror.wake()
    assert mirror.finish(JOIN_S)
