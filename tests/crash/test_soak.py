"""A job killed at random times and restarted ends like an uninterrupted one (`scripts/faults/soak_kill.py`)."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import trainer.__main__
from scripts.faults.soak_kill import Launch, Soak, SoakJob, Torchrun, main, soak
from tests.crash.hosts import Mount, on_hosts
from tests.harness import Running, started


def run_trainer(arguments: list[str]) -> None:
    sys.argv = arguments
    trainer.__main__.main()


class Forked:
    """Two ranks of the trainer, forked from a process that has torch imported: they start in no time."""

    def __init__(
        self, run: Path, overrides: Sequence[str], function: Callable[[list[str]], None] = run_trainer
    ) -> None:
        arguments = ["trainer", f"run.dir={run}", *overrides]
        self._stack = contextlib.ExitStack()
        self._running: Running = self._stack.enter_context(started(function, arguments, folder=run, ranks=2))

    def status(self) -> int | None:
        statuses = [process.exitcode for process in self._running.processes]
        failed = [status for status in statuses if status]
        return failed[0] if failed else None if None in statuses else 0

    def kill(self) -> None:
        self._stack.close()


@pytest.mark.slow
def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    tally = soak(Soak(tmp_path, 12, iterations=80), Forked)
    assert tally.problems == []
    assert tally.kills == 12
    assert len(tally.moments) > 1


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Path(folder)


def on_two_hosts(plan: Soak) -> Launch:
    """Return the launch of two ranks on hosts of their own, with their folders mounted at one path."""

    def launch(run: Path, overrides: Sequence[str]) -> SoakJob:
        mounted = plan.local_dir(run)
        for folder in (mounted, *plan.folders(run)):
            folder.mkdir(parents=True, exist_ok=True)
        mounts = {host: [Mount(mounted, folder)] for host, folder in enumerate(plan.folders(run))}
        return Forked(run, overrides, on_hosts(run_trainer, mounts))

    return launch


# Two ranks of one host, and two hosts with copies.
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_kill_costs_two_iterations_of_local_saves(tmp_path: Path, memory: Path, hosts: int) -> None:
    plan = Soak(tmp_path, 6, iterations=80, overrides=("parallel.zero_stage=3",), local=memory, hosts=hosts)
    tally = soak(plan, Forked if hosts == 1 else on_two_hosts(plan))
    assert tally.problems == []
    assert tally.kills == 6
    assert max(tally.lost) <= 2


@pytest.mark.slow
@pytest.mark.nightly
def test_a_job_of_torchrun_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2", "--iterations", "60", "--folder", str(tmp_path / "soak")]) == 0
    assert "soak_kill: 2 kills" in capsys.readouterr().out


class Broken:
    """A job that has ended at once, and left a curve and no checkpoint."""

    def __init__(self, run: Path, iterations: int, status: int) -> None:
        run.mkdir(parents=True, exist_ok=True)
        row = {"loss": 1.0, "loss_hex": "0x1", "grad_norm_hex": "0x1", "lr_hex": "0x1", "consumed_samples": 4}
        lines = [json.dumps({"iteration": number, **row}) + "\n" for number in range(1, iterations + 1)]
        (run / "metrics.jsonl").write_text("".join(lines))
        self._status = status

    def status(self) -> int | None:
        return self._status

    def kill(self) -> None:
        return


@pytest.mark.parametrize(
    ("iterations", "status", "problem"),
    [(4, 0, "checkpoint is missing"), (3, 0, "curves differ"), (4, 1, "a start after a kill ended with status 1")],
)
def test_a_run_that_is_not_the_unbroken_one_is_told(tmp_path: Path, iterations: int, status: int, problem: str) -> None:
    def launch(run: Path, _overrides: Sequence[str]) -> SoakJob:
        return Broken(run, 4, 0) if run.name == "unbroken" else Broken(run, iterations, status)

    tally = soak(Soak(tmp_path, 1, iterations=4), launch)
    assert any(problem in found for found in tally.problems)


def test_no_process_of_a_killed_job_is_left(tmp_path: Path) -> None:
    job = Torchrun(tmp_path / "run", ["train.train_itres=1"], ranks=1)
    job.kill()
    assert job.status() is not None
    job.kill()
