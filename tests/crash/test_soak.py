"""A job killed at random times and restarted ends like an uninterrupted one (`scripts/faults/soak_kill.py`)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scripts.faults.job import SoakJob, TrainerJob
from scripts.faults.soak_kill import Launch, Soak, main, soak
from tests.crash.hosts import Mount, on_hosts, run_trainer
from tests.harness import Running, started
from tests.profiles import nightly


class Forked:
    """Two ranks of the trainer, forked from a process that has torch imported: they start in no time."""

    def __init__(
        self, run: Path, overrides: Sequence[str], function: Callable[[list[str]], None] = run_trainer
    ) -> None:
        self._stack = contextlib.ExitStack()
        arguments = [f"run.dir={run}", *overrides]
        self._running: Running = self._stack.enter_context(started(function, arguments, folder=run, ranks=2))

    def status(self) -> int | None:
        statuses = [process.exitcode for process in self._running.processes]
        failed = [status for status in statuses if status]
        return failed[0] if failed else None if None in statuses else 0

    def kill(self) -> None:
        self._stack.close()


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


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [0, nightly(1), nightly(2)], ids=["shared", "one host", "two hosts with copies"])
def test_a_kill_costs_two_iterations_of_local_saves(tmp_path: Path, memory: Path, hosts: int) -> None:
    plan = Soak(tmp_path, 12, iterations=80)
    if hosts:
        plan = Soak(tmp_path, 6, iterations=80, overrides=("parallel.zero_stage=3",), local=memory, hosts=hosts)
    tally = soak(plan, on_two_hosts(plan) if hosts == 2 else Forked)
    assert tally.problems == []
    assert tally.kills == (6 if hosts else 12)
    assert not hosts or max(tally.lost) <= 2


@pytest.mark.slow
@pytest.mark.nightly
def test_a_job_of_torchrun_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2", "--iterations", "60", "--folder", str(tmp_path / "soak")]) == 0
    assert "soak_kill: 2 kills" in capsys.readouterr().out


@pytest.mark.slow
def test_no_process_of_a_killed_job_is_left(tmp_path: Path) -> None:
    job = TrainerJob(["train.train_itres=1"], tmp_path / "log", ranks=2)
    job.kill()
    assert job.status() is not None
    job.kill()
