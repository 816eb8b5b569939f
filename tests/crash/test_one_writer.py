"""One job writes to a folder: a second one is refused, a dead one replaced, and one that comes back changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reprise.storage import TRACKER, Files, lock
from tests.crash import small_run
from tests.crash.hosts import run_trainer
from tests.crash.moments import await_true, standing
from tests.crash.outcomes import saved
from tests.crash.small_run import Plan
from tests.harness import TINY, Ended, Running, all_files, call_on_ranks, started
from tests.profiles import slow

DEADLINE_S = 240.0
FIRST = 2  # iterations that are saved before; in the save of the next one a process is stopped


def stopping(arguments: list[str]) -> None:
    """Run a plan, and stop (SIGSTOP) at the first call of a kind with a path that matches."""
    (kind, pattern), plan = json.loads(arguments[0]), arguments[1:]
    real, was_stopped = getattr(Files, kind), False

    def stop(self: Files, *given: Any, **keywords: Any) -> Any:
        nonlocal was_stopped
        paths = [os.readlink(f"/proc/self/fd/{each}") if isinstance(each, int) else str(each) for each in given]
        if not was_stopped and any(re.search(pattern, path) for path in paths):
            was_stopped = True
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # before this very call, not a little later
        return real(self, *given, **keywords)

    setattr(Files, kind, stop)
    small_run.main(plan)


# Calls of a save, in order, and what is committed when the process is stopped before it.
MOMENTS = [
    slow("open_for_writing", "iter_0000003", 2),
    slow("sync", "iter_0000003", 2),
    slow("write_new", r"manifest\.json", 2),
    ("rename", "/iter_0000003$", 2),
    slow("sync_folder", "/checkpoints$", 3),
    slow("write_new", "latest_checkpointed", 3),
    slow("rename", "latest_checkpointed", 3),
]


def run_plan(folder: Path, log: str = "plan", *, iterations: int = 5) -> Ended:
    plan = Plan(str(folder), keep=2, iterations=iterations)
    return call_on_ranks(small_run.main, plan.arguments(), folder=folder.with_name(log), ranks=1)


@contextmanager
def stopped(folder: Path, kind: str, pattern: str) -> Iterator[Running]:
    """Start a run and yield it once it is stopped."""
    plan = Plan(str(folder), keep=2, iterations=5)
    assert run_plan(folder, iterations=FIRST).ok
    arguments = [json.dumps([kind, pattern]), *plan.arguments()]
    with started(stopping, arguments, folder=folder, ranks=1) as running:
        (process,) = running.processes

        def is_stopped() -> bool:
            assert process.exitcode is None, running.outputs[0].read_text()
            return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

        await_true(is_stopped)
        yield running


@pytest.mark.parametrize(("kind", "pattern", "committed"), MOMENTS)
def test_a_job_that_returns_after_its_successor_changes_nothing(
    tmp_path: Path, kind: str, pattern: str, committed: int
) -> None:
    folder = tmp_path / "run"
    tracked = f"checkpoints/{TRACKER}"
    with stopped(folder, kind, pattern) as zombie:
        assert max(int(path.name[5:]) for path in folder.glob("checkpoints/iter_*")) == committed
        second = run_plan(folder, "second")
        assert not second.ok
        assert f"host {socket.gethostname()}, pid {zombie.processes[0].pid}, started 20" in second.text
        # As on a file system that carries no flock between hosts, or after somebody removed the file by hand.
        (folder / "checkpoints/lock").unlink()
        successor = run_plan(folder, "successor")
        assert successor.ok, successor.text
        before = all_files(folder)
        zombie.send(0, signal.SIGCONT)
        zombie.join(DEADLINE_S)
    assert zombie.ended().statuses == (1,), zombie.ended().text
    after = all_files(folder)
    # A hint that nobody relies on: the next start mends it.
    assert before.pop(tracked) == b"5\n"
    assert after.pop(tracked) in (b"3\n", b"5\n")
    assert after == before
    assert run_plan(folder, "next").ok
    assert (folder / tracked).read_text() == "5\n"


BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=12", "checkpoint.save_interval=4")
INLINE = "checkpoint.async_save=false"


def run_successor(arguments: list[str]) -> None:
    """Run the trainer, which watches the lock of another host for a second in place of two minutes."""
    lock.STALE_S = 1.0
    run_trainer(arguments)


@pytest.mark.parametrize(("moment", "ranks"), [("save", 1), slow("prepare", 1), slow("save", 2), slow("step", 1)])
def test_a_stopped_trainer_taken_for_dead_ends_with_a_lock_error(tmp_path: Path, moment: str, ranks: int) -> None:
    run = tmp_path / "run"
    locks = [run / "checkpoints/lock", run / "lock"]
    iteration = 6 if moment == "step" else 8
    gated = [0] if moment == "prepare" else None
    overrides = [*BASE, INLINE] if moment == "save" else BASE
    with standing(run, overrides, moment=moment, iteration=iteration, ranks=ranks, gated=gated) as (zombie, gate):
        gate.await_reached()
        await_true(lambda: b'"saved":4' in (run / "run.json").read_bytes())  # written in the background
        for rank in range(ranks):
            zombie.send(rank, signal.SIGSTOP)
        holder = json.loads(locks[0].read_text())
        for held in locks:  # as another host sees it where flock does not reach: held there, and silent
            seen = held.with_name("seen")
            seen.write_text(json.dumps({**json.loads(held.read_text()), "host": "elsewhere"}))
            seen.replace(held)
        successor = call_on_ranks(run_successor, [f"run.dir={run}", *BASE], folder=tmp_path / "successor", ranks=ranks)
        assert successor.ok, successor.text
        assert "iteration 4 from" in successor.text
        before = all_files(run)
        assert json.loads(before["checkpoints/lock"] or b"{}").get("nonce") != holder["nonce"]
        gate.open()
        for rank in range(ranks):
            zombie.send(rank, signal.SIGCONT)
        zombie.join(DEADLINE_S)
    ended = zombie.ended()
    assert set(ended.statuses) == {1}, ended.text
    assert "Another job writes to this folder" in ended.outputs[0]
    if moment == "save":  # its files were swept: it hears why with the save that fails by that, not with the next
        assert "step     8/12" in ended.outputs[0]
        assert "step     9/12" not in ended.outputs[0]
    # The stacks of a rank that its watchdog ended are new files, which only tell of it.
    assert {name: data for name, data in all_files(run).items() if not name.startswith("hangs/")} == before


SHORT = (*BASE, "train.train_iters=4", "checkpoint.save_interval=2", INLINE)


@pytest.mark.parametrize("elsewhere", ["checkpoint.save=null", slow("checkpoint.save={}")])
def test_a_second_job_with_the_same_run_folder_is_refused(tmp_path: Path, elsewhere: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    second = [f"run.dir={run}", *SHORT, "checkpoint.load=none", elsewhere.format(other)]
    with standing(run, SHORT, moment="step", iteration=3) as (running, gate):
        gate.await_reached()
        before = all_files(run)
        ended = call_on_ranks(run_trainer, second, folder=tmp_path / "second", ranks=1)
        assert ended.statuses == (1,), ended.text
        assert f"LockError: Another job writes to this folder ({run})" in ended.text
        assert f"host {socket.gethostname()}, pid {running.processes[0].pid}" in ended.text
        assert all_files(run) == before
        assert not other.exists()
        gate.open()
        running.join(DEADLINE_S)
    assert running.ended().ok, running.ended().text
    assert saved(run) == [2, 4]
    assert [(run / name / "lock").read_bytes() for name in ("", "checkpoints")] == [b"", b""]


@pytest.mark.slow
def test_checkpoints_in_the_run_s_own_folder_share_its_lock(tmp_path: Path) -> None:
    ended = call_on_ranks(
        run_trainer, [f"run.dir={tmp_path}", *SHORT, f"checkpoint.save={tmp_path}"], folder=tmp_path, ranks=1
    )
    assert ended.ok, ended.text
    assert [path.parent for path in tmp_path.rglob("lock")] == [tmp_path]
