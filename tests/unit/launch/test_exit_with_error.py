"""An error is printed once a host under torchrun, whose report names it."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import NoReturn

import pytest

import trainer.launch.exit_with_error as ending
from reprise.errors import LaunchError, TrainerError
from trainer.launch.environment import Environment
from trainer.launch.exit_with_error import exit_with_error


class Left(Exception):
    """The process ended with a status."""


def leave(status: int) -> NoReturn:
    raise Left(status)


@pytest.fixture(autouse=True)
def _stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(ending, "_TURN_S", 60.0)


def environment(rank: int, *, is_torchrun: bool = True) -> Environment:
    return Environment(rank, 2, rank, 2, "localhost", 1, has_agent_store=is_torchrun, is_torchrun=is_torchrun)


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (TrainerError("It failed", fix="Mend it."), 1, "TrainerError: It failed. Mend it."),
        (KeyboardInterrupt(), 130, "Interrupted before the first iteration. Nothing was saved."),
        (ValueError("a defect"), 1, "ValueError: a defect"),
        (FileNotFoundError(2, "none", "a"), 1, "FileNotFoundError: [Errno 2] none: 'a'"),
        (OSError(5, "I/O error", "a/b"), 1, "OSError: [Errno 5] I/O error: 'a/b'"),
    ],
)
def test_torchrun_reports_the_message(
    error: BaseException, status: int, text: str, error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Left, match=str(status)):
        exit_with_error(error, environment(0))
    assert capsys.readouterr().err == f"{text}\n"
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == text
    assert int(message["extraInfo"]["timestamp"]) > 0


def test_without_torchrun_no_rank_waits_or_writes(error_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in (None, environment(1, is_torchrun=False)):
        with pytest.raises(Left):
            exit_with_error(TrainerError("It failed"), given)
    assert capsys.readouterr().err == "TrainerError: It failed.\nrank 1: TrainerError: It failed.\n"
    assert not error_file.exists()


def echo() -> LaunchError:
    error = LaunchError("Rank 1 failed: x")
    error.is_echo = True
    return error


@pytest.mark.parametrize(("rank", "error"), [(1, TrainerError("It failed")), (0, echo()), (1, echo())])
def test_a_rank_that_torchrun_ends_in_its_turn_is_silent(
    rank: int, error: TrainerError, error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, main = signal.getsignal(signal.SIGTERM), threading.main_thread().ident
    assert main is not None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the rank waits, the signal is repeated
    is_over = threading.Event()

    def end() -> None:
        while not is_over.wait(0.01):
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        with pytest.raises(Left):
            exit_with_error(error, environment(rank))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        is_over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == ""
    assert not error_file.exists()


def test_a_rank_that_is_not_ended_prints_in_its_turn(
    error_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "_TURN_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Left):
            exit_with_error(echo(), environment(1))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "rank 1: LaunchError: Rank 1 failed: x.\n"
    assert error_file.exists()
