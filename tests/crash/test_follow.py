"""Followers of runs of the trainer: what they hold, and the one line of each checkpoint over any number of kills."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

import trainer.commands.follow
from reprise.storage import CheckpointFolder, Files, Json, holds
from reprise.storage.holds import EXPIRY_S, is_held
from tests.crash.killing import AFTER, BEFORE, TORN, Killer
from tests.harness import TINY, Ended, call_on_ranks, run_ok
from tests.profiles import slow

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "schedule.lr_decay_iters=12",
    "checkpoint.save_interval=1",
    "checkpoint.async_save=false",
)
COUNT = 'echo "$1" >> "$2"; echo "{\\"size\\": 1}"'


def lines(run: Path) -> list[Json]:
    path = run / "follow.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def statuses(run: Path) -> list[tuple[int, int]]:
    return [(line["iteration"], line["status"]) for line in lines(run)]


def held(run: Path, *, after_s: float = 0.0) -> list[int]:
    """Return the iterations that are held when a time has passed."""
    folder = CheckpointFolder(run / "checkpoints", Files())
    with mock.patch.object(holds, "file_system_time", return_value=time.time() + after_s):
        return [n for n in folder.committed() if is_held(folder.iteration(n))]


def follow_killed(arguments: list[str]) -> None:
    """Follow a run, and die at the call of a number; no number: to the end. Notes the calls beside the run."""
    kill, *words = arguments
    run = Path(words[0])
    at, when = json.loads(kill) if kill else (None, BEFORE)
    killer = Killer(run, notes=run.with_name("notes"), at=at, when=when)
    killer.install()
    status = trainer.commands.follow.main(words)
    run.with_name("calls").write_text(str(len(killer.calls)))
    raise SystemExit(status)


def follow(run: Path, *words: str, kill: str = "") -> Ended:
    """Follow a run to its end, or to a kill."""
    ended = call_on_ranks(follow_killed, [kill, str(run), *words], folder=run.with_name("follower"), ranks=1)
    assert ended.statuses == (-signal.SIGKILL if kill else 0,), ended.text
    return ended


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    run_ok(run, [*BASE, "train.train_iters=4"])
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("kills", [1, slow(8)])
def test_random_kills_leave_each_checkpoint_one_line(trained: Path, run: Path, kills: int) -> None:
    ran = run.with_name("ran")
    words = ["--", "sh", "-c", COUNT, "sh", "{}", str(ran)]
    follow(run, *words)
    calls = int(run.with_name("calls").read_text())
    draws = random.Random(kills)
    for _ in range(kills):
        shutil.rmtree(run)
        shutil.copytree(trained, run)
        ran.unlink(missing_ok=True)
        kill = json.dumps([draws.randrange(calls), draws.choice([BEFORE, AFTER, TORN])])
        follow(run, *words, kill=kill)
        assert held(run, after_s=EXPIRY_S) == []  # a hold that was killed half-way through its record takes that long
        before = (run / "follow.jsonl").read_bytes() if (run / "follow.jsonl").exists() else b""
        follow(run, *words)
        assert statuses(run) == [(1, 0), (2, 0), (3, 0), (4, 0)], kill
        assert (run / "follow.jsonl").read_bytes().startswith(before[: before.rfind(b"\n") + 1])
        assert len(ran.read_text().splitlines()) in (4, 5), kill
        assert held(run, after_s=EXPIRY_S) == []
