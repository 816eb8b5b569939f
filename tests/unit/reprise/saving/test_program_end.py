"""Programs that end with a save under way: it lands, or the program's status is 1."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from reprise import AsyncSaver, load_state_dict
from reprise.saving import program_end
from reprise.saving.checkpointer import Checkpointer
from reprise.storage.files import Files
from tests import ROOT
from tests.distributed.test_ranks_that_disagree import process_group
from tests.fakes import JOIN_S, FailingFiles, StuckFiles
from tests.harness import Ended, call_on_ranks, started

STATE = {"a": torch.arange(5.0)}


class AtTheEnd(Files):
    """A disk that writes nothing before the program has come to its end."""

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        threading.main_thread().join(JOIN_S)
        super().write(descriptor, data, offset=offset)


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a function of this module as a program of its own."""
    code = f"from tests.unit.reprise.saving import test_program_end as t\nt.{program}({str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=JOIN_S,
        check=False,
    )


def save_and_end(folder: str) -> None:
    saver = AsyncSaver(folder, files=AtTheEnd())
    saver.save_state_dict(1, STATE)


def save_after_the_main_thread(folder: str) -> None:
    saver = AsyncSaver(folder)

    def save() -> None:
        threading.main_thread().join(JOIN_S)
        saver.save_state_dict(1, STATE)

    threading.Thread(target=save).start()


def fail_at_the_end(folder: str) -> None:
    atexit.register(print, "goodbye")
    for path, files in ((folder, AtTheEnd()), (f"{folder}/failing", FailingFiles("sync"))):
        AsyncSaver(path, files=files).save_state_dict(1, STATE)


def fail_with_a_hanging_disk(folder: str) -> None:
    program_end.LINGER_S = 0.1
    files = StuckFiles()
    AsyncSaver(folder, files=files).save_state_dict(1, STATE)
    assert files.reached.wait(JOIN_S)
    raise ZeroDivisionError


def committed(folder: Path) -> dict[str, torch.Tensor]:
    again = {"a": torch.zeros(5)}
    load_state_dict(folder / "iter_0000001", again)
    return again


_LATE = pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3), reason="no thread starts after the main thread has ended"
)


@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        ("save_and_end", 0, ()),
        pytest.param("save_after_the_main_thread", 0, (), marks=[pytest.mark.slow, _LATE]),
        pytest.param("fail_at_the_end", 1, ("errno 5", "goodbye"), marks=pytest.mark.slow),
        pytest.param(
            "fail_with_a_hanging_disk", 1, ("ZeroDivisionError", "did not end in time"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_program_awaits_its_dropped_saver_or_fails(
    tmp_path: Path, program: str, status: int, words: tuple[str, ...]
) -> None:
    ended = run(program, tmp_path)
    assert ended.returncode == status, ended.stderr
    assert all(word in ended.stdout + ended.stderr for word in words)
    assert words or not ended.stderr
    if program == "fail_with_a_hanging_disk":
        assert not list(tmp_path.glob("iter_*"))
    else:
        assert torch.equal(committed(tmp_path)["a"], STATE["a"])


def end_without_the_group(arguments: list[str]) -> None:
    with process_group():
        AsyncSaver(arguments[0], files=AtTheEnd()).save_state_dict(1, STATE)
    assert not dist.is_initialized()


def end_before_the_other(arguments: list[str]) -> None:
    group = process_group()
    rank = group.__enter__()
    saver = AsyncSaver(arguments[0], files=StuckFiles() if rank else None, commit_timeout_s=2.0)
    saver.save_state_dict(1, STATE)
    dist.barrier()
    if rank:
        os._exit(0)  # without its report
    dist.destroy_process_group()


def call(function: object, folder: Path) -> Ended:
    with started(function, [str(folder)], folder=folder / "ranks", ranks=2) as running:  # type: ignore[arg-type]
        running.join(JOIN_S)
    return running.ended()


@pytest.mark.slow
def test_two_ranks_save_after_their_process_group(tmp_path: Path) -> None:
    ended = call_on_ranks(end_without_the_group, [str(tmp_path)], folder=tmp_path / "ranks", ranks=2)
    assert ended.ok, ended.text
    assert torch.equal(committed(tmp_path)["a"], STATE["a"])


def test_a_rank_that_ends_alone_fails(tmp_path: Path) -> None:
    ended = call(end_before_the_other, tmp_path)
    assert ended.statuses == (1, 0), ended.text
    assert "No message from rank 1" in ended.text
    assert not list(tmp_path.glob("iter_*"))


class Interrupting(FailingFiles):
    """A disk that writes only after Ctrl-C has ended the wait of the main thread."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__("write" if fails else "nothing")
        self.reached, self.interrupted = threading.Event(), threading.Event()

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        self.reached.set()
        assert self.interrupted.wait(JOIN_S)
        super().write(descriptor, data, offset=offset)


@pytest.mark.parametrize(("call", "fails"), [("close", False), ("wait", True)])
def test_a_save_outlasts_an_interrupt_of_the_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, fails: bool
) -> None:
    files = Interrupting(fails=fails)

    def interrupt() -> None:
        assert files.reached.wait(JOIN_S)
        while not files.interrupted.is_set():  # the main thread may not be at its wait yet
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def interrupted(*_: object) -> None:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not Checkpointer.wait.__code__:
            frame = frame.f_back
        if frame is not None and not files.interrupted.is_set():
            files.interrupted.set()
            raise KeyboardInterrupt

    def save() -> None:
        with AsyncSaver(tmp_path, files=files) as saver:
            saver.save_state_dict(1, STATE)
            pressing.start()
            getattr(saver, call)()

    usual = signal.signal(signal.SIGALRM, interrupted)
    pressing = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            save()
    finally:
        pressing.join(JOIN_S)
        signal.signal(signal.SIGALRM, usual)
    if fails:
        assert "iteration 1 was not saved" in caplog.text
        assert not (tmp_path / "iter_0000001").exists()
    else:
        assert torch.equal(committed(tmp_path)["a"], STATE["a"])
    AsyncSaver(tmp_path).close()  # the folder is free
