"""The job for SLURM, on stand-ins for its commands: it signals the ranks, they save, it is queued again."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import DEADLINE_S, TINY, curve, last_iteration, run_ok
from tests.resume.test_torchrun import PYTHON, ROOT, await_iteration, said, started

JOB = ROOT / "scripts/train.sbatch"
BASE = ["model=gpt2_tiny", *TINY, "checkpoint.save_interval=5", "train.train_iters=3000"]

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
    show) echo 127.0.0.1 ;;
    requeue) touch "$REQUEUED" ;;
esac
"""
# Stands where a rank's command line has `-m trainer` or `reprise`: waits for a signal and exits with its number.
# SIGUSR1 has the lower number, so that it is taken first where both are pending.
RANK = """
import signal, sys
both = [signal.SIGUSR1, signal.SIGTERM]
signal.pthread_sigmask(signal.SIG_BLOCK, both)
print("waiting", flush=True)
sys.exit(signal.sigwait(both))
"""
needs_procps = pytest.mark.skipif(shutil.which("pkill") is None, reason="needs pkill and pgrep of procps")


@contextmanager
def rank(folder: Path, override: str, *, job: str = "", is_installed: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has the command line of a rank, in the environment of a job.

    Args:
        is_installed: whether its launcher started the command `reprise train`, and not the module `trainer`.
    """
    program = folder / ("reprise" if is_installed else "trainer.py")
    program.write_text(RANK)
    start = [str(program), "train"] if is_installed else ["-u", "-m", "trainer"]
    command = [sys.executable, *start, "model=gpt2_tiny", override, "train.seed=1"]
    environment = {**os.environ, "SLURM_JOB_ID": job, "PYTHONPATH": str(folder)}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            yield process
        finally:
            process.kill()


def first_signal(process: subprocess.Popen[str]) -> int:
    """Return SIGUSR1 where the process was sent it, and else the SIGTERM that is sent here."""
    process.terminate()
    return process.wait(DEADLINE_S)


@needs_procps
@pytest.mark.parametrize("is_installed", [False, True], ids=["-m trainer", "reprise train"])
def test_the_documented_command_signals_one_run_of_several(is_installed: bool, tmp_path: Path) -> None:
    command = re.findall(r"^pkill .*$", (ROOT / "docs/launching.md").read_text(), re.MULTILINE)[is_installed]
    name = f"two-{secrets.token_hex(8)}"
    assert command.count("=two") == 1
    with (
        rank(tmp_path, f"run.name={name}", is_installed=is_installed) as ours,
        rank(tmp_path, f"run.name={name}1", is_installed=is_installed) as longer,
        rank(tmp_path, "run.name=one", is_installed=is_installed) as other,
    ):
        subprocess.run(["bash", "-c", command.replace("=two", f"={name}")], check=True, timeout=DEADLINE_S)
        assert [first_signal(process) for process in (ours, longer, other)] == [
            signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM,
        ]  # fmt: skip


@needs_procps
def test_the_job_signals_its_own_ranks_and_no_others_on_the_node(tmp_path: Path) -> None:
    ask = JOB.read_text().partition("WORKERS=")[2].partition("trap ")[0]
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    job = secrets.token_hex(8)
    with rank(tmp_path, "run.name=a", job=job) as ours, rank(tmp_path, "run.name=a", job=f"{job}1") as other:
        environment = {**os.environ, "SLURM_JOB_ID": job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", f"WORKERS={ask}ask"], env=environment, timeout=DEADLINE_S, check=False)
        assert (first_signal(ours), first_signal(other)) == (signal.SIGUSR1, signal.SIGTERM)


def test_the_document_and_the_job_name_the_ranks_alike() -> None:
    (pattern,) = re.findall(r"WORKERS='(.*)'", JOB.read_text())
    assert f"pkill -USR1 --full '{pattern} " in (ROOT / "docs/launching.md").read_text()
    assert re.search(pattern, "/some/where/bin/python3.11 -u -m trainer run.name=a")
    _, installed = re.findall(r"^pkill -USR1 --full '(.* )\.\*", (ROOT / "docs/launching.md").read_text(), re.MULTILINE)
    torchrun = "/some/where/bin/python /some/where/bin/torchrun --no-python --nnodes 2 reprise train run.name=a"
    assert re.search(installed, "/some/where/bin/python3.11 /some/where/bin/reprise train run.name=a")
    assert not re.search(installed, torchrun)
    assert not re.search(pattern, "/some/where/bin/python /some/where/bin/torchrun --nnodes 2 -m trainer run.name=a")
    assert not re.search(pattern, "/some/where/bin/python -u -m torch.distributed.run --nnodes 2 -m trainer run.name=a")


@pytest.mark.slow
@needs_procps
def test_a_job_asked_to_stop_saves_and_requeues_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, requeued = tmp_path / "bin", tmp_path / "requeued"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("REQUEUED", str(requeued))
    for name, value in {"NNODES": "1", "JOB_ID": secrets.token_hex(8), "JOB_NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    job, metrics = tmp_path / "job", tmp_path / "run/metrics.jsonl"
    text = JOB.read_text().replace("--nproc-per-node 8", "--nproc-per-node 2")
    job.write_text(text.replace('"$head:29500"', '"$head:0"'))
    with started(["bash", str(job), "run.dir=run", *BASE], tmp_path) as process:
        await_iteration(process, metrics, 7, saved=5)
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert requeued.exists()
    stopped = last_iteration(metrics)
    assert last_iteration(metrics, "save") == stopped < 3000
    # The same job, when it is started again, goes on from there.
    again = [*BASE[:-1], f"train.train_iters={stopped + 2}", "schedule.lr_decay_iters=3000"]
    assert f"iteration {stopped} from" in run_ok(tmp_path / "run", again, ranks=2).outputs[0]
    assert [row[0] for row in curve(tmp_path / "run")] == list(range(1, stopped + 3))


@pytest.mark.slow
def test_a_requeued_job_resumes_whatever_its_command_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*PYTHON, "run.dir=run", *BASE[:-1], "schedule.lr_decay_iters=10", "checkpoint.load=none"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for count, last, says in (("", 3, "starting fresh"), ("1", 6, "iteration 3 from"), ("2", 8, "iteration 6 from")):
        if count:
            monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        status, text = said([*command, f"train.train_iters={last}"], tmp_path)
        assert status == 0, text
        assert says in text
    assert not list((tmp_path / "run/checkpoints").glob("*.superseded-*"))
    assert [row[0] for row in curve(tmp_path / "run")] == list(range(1, 9))


def test_the_job_is_a_script_that_bash_understands() -> None:
    subprocess.run(["bash", "-n", str(JOB)], check=True)
