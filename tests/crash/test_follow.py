"""Followers of runs of the trainer: what they hold, and the one line of each checkpoint over any number of kills."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import trainer.commands.follow
from reprise.storage import CheckpointFolder, Files, Json, iteration_name
from reprise.storage.holds import EXPIRY_S, is_held
from tests.crash.killing import AFTER, BEFORE, TORN, Killer
from tests.crash.outcomes import saved
from tests.harness import DEADLINE_S, TINY, Ended, call_on_ranks, checkpoint, run_ok, started
from tests.profiles import slow
from tests.stores.saving import content

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "schedule.lr_decay_iters=12",
    "checkpoint.save_interval=1",
    "checkpoint.async_save=false",
)
KEEP_1 = (*BASE, "checkpoint.max_checkpoint_keep=1")
# Tells the test that it runs, waits to be let go, and looks for the files of the checkpoint that it was given.
GATED = 'echo began > "$2"; read answer < "$3"; ls "$1"/*.safetensors >&2 && echo "{\\"answer\\": $answer}"'
COUNT = 'echo "$1" >> "$2"; echo "{\\"size\\": 1}"'


def lines(run: Path) -> list[Json]:
    path = run / "follow.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def statuses(run: Path) -> list[tuple[int, int]]:
    return [(line["iteration"], line["status"]) for line in lines(run)]


def held(run: Path, *, after_s: float = 0.0) -> list[int]:
    """Return the iterations that are held when a time has passed."""
    folder = CheckpointFolder(run / "checkpoints", Files())
    return [n for n in folder.committed() if is_held(folder.iteration(n), clock=lambda _: time.time() + after_s)]


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


class Pipe:
    """A named pipe to or from a command; open here from the start, so that nobody waits for the other end."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def read(self) -> bytes:
        """Return what is written next; fail if nothing is."""
        assert select.select([self.descriptor], [], [], DEADLINE_S)[0], "nothing was written in time"
        return os.read(self.descriptor, 64)


@pytest.mark.slow
def test_a_killed_follower_loses_nothing_that_it_held(tmp_path: Path) -> None:
    run, began, go_on = tmp_path / "run", Pipe(tmp_path / "began"), Pipe(tmp_path / "go_on")
    pipes = (str(tmp_path / "began"), str(tmp_path / "go_on"))
    words = ["", str(run), "--json-metric", "answer", "--", "sh", "-c", GATED, "sh", "{}", *pipes]
    run_ok(run, [*KEEP_1, "train.train_iters=4"])
    assert saved(run) == [4]
    with started(follow_killed, words, folder=tmp_path / "killed", ranks=1) as follower:
        assert began.read() == b"began\n"  # the command runs, and waits
        run_ok(run, [*KEEP_1, "train.train_iters=8"])
        assert (saved(run), held(run)) == ([4, 8], [4])
        follower.send(0, signal.SIGKILL)
        follower.join(DEADLINE_S)
    assert (held(run), lines(run)) == ([], [])  # no retention has run since
    with started(follow_killed, words, folder=tmp_path / "resumed", ranks=1) as follower:
        for number in (1, 2):
            assert began.read() == b"began\n"
            os.write(go_on.descriptor, f"{number}\n".encode())
        follower.join(DEADLINE_S)
    assert follower.ended().ok, follower.ended().text
    assert statuses(run) == [(4, 0), (8, 0)]
    assert [line["value"] for line in lines(run)] == [1.0, 2.0]
    assert held(run) == []
    run_ok(run, [*KEEP_1, "train.train_iters=9"])
    assert saved(run) == [9]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    run_ok(run, [*BASE, "train.train_iters=4"])
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.slow
def test_a_rewound_run_has_lines_of_both_branches(run: Path, tmp_path: Path) -> None:
    words = ("--once", "--json-metric", "size", "--", "sh", "-c", COUNT, "sh", "{}", str(tmp_path / "ran"))
    follow(run, *words)
    run_ok(run, [*BASE, "train.train_iters=5", "checkpoint.ckpt_step=2"])
    follow(run, *words)
    assert [line["iteration"] for line in lines(run)] == [1, 2, 3, 4, 3, 4, 5]
    first, second = lines(run)[0]["branch"], lines(run)[-1]["branch"]
    assert [line["branch"] for line in lines(run)] == [first] * 4 + [second] * 3
    assert first != second
    assert [branch["began_at"] for branch in lines(run)[-1]["branches"]] == [-1, 2]


REPRISE = ("--", sys.executable, "-m", "reprise")


@pytest.mark.slow
def test_the_recipe_of_generate(run: Path) -> None:
    for number in (1, 2, 3):
        shutil.rmtree(checkpoint(run, number))
    ended = follow(run, *REPRISE, "generate", "{}", "--prompt", "def ", "--max-new-tokens", "4")
    assert "\ndef " in ended.text
    assert [(line["iteration"], line["status"], line["result"]) for line in lines(run)] == [(4, 0, None)]


@pytest.mark.slow
def test_the_recipe_of_a_copy_in_a_store(run: Path, tmp_path: Path) -> None:
    follow(run, *REPRISE, "checkpoint", "copy", "{}", f"file://{tmp_path / 'store'}")
    for name in map(iteration_name, (1, 2, 3, 4)):
        assert content(tmp_path / "store" / name) == content(run / "checkpoints" / name)


@pytest.mark.parametrize("kills", [1, slow(25)])
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
