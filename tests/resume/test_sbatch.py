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

from tests.harness import TINY, curve, last_iteration, run_ok
from tests.resume.test_torchrun import PYTHON, ROOT, await_iteration, started

JOB = ROOT / "scripts/train.sbatch"
BASE = ["model=gpt2_tiny", *TINY, "checkpoint.save_interval=5", "train.train_iters=3000"]
TIMEOUT_S = 300.0

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
    return process.wait(TIMEOUT_S)


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
        subprocess.run(["bash", "-c", command.replace("=two", f"={name}")], check=True, timeout=TIMEOUT_S)
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
        subprocess.run(["bash", "-c", f"WORKERS={ask}ask"], env=environment, timeout=TIMEOUT_S, check=False)
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
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    requeued = tmp_path / f"requeued-{secrets.token_hex(4)}"
    monkeypatch.setenv("PATH", f"{commands}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("REQUEUED", str(requeued))
    for name, value in {"NNODES": "1", "JOB_ID": secrets.token_hex(8), "JOB_NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    job = tmp_path / "job"
    text = JOB.read_text().replace("--nproc-per-node 8", "--nproc-per-node 2")
    job.write_text(text.replace('"$head:29500"', '"$head:0"'))
    with started(["bash", str(job), "run.dir=run", *BASE], tmp_path) as process:
        await_iteration(process, tmp_path / "run/metrics.jsonl", 7, saved=5)
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert requeued.exists()
    stopped = last_iteration(tmp_path / "run/metrics.jsonl")
    assert last_iteration(tmp_path / "run/metrics.jsonl", "save") == stopped < 3000
    # The same job, when it is started again, goes on from there, and its curve is that of an unbroken run.
    end = stopped + 5
    again = [*BASE[:-1], f"train.train_iters={end}", "schedule.lr_decay_iters=3000"]
    ended = run_ok(tmp_path / "run", again, ranks=2)
    assert f"iteration {stopped} from" in ended.outputs[0]
    run_ok(tmp_path / "unbroken", again, ranks=2)
    assert curve(tmp_path / "run") == curve(tmp_path / "unbroken")


@pytest.mark.slow
def test_a_requeued_job_resumes_whatever_its_command_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*PYTHON, "run.dir=run", *BASE[:-1], "schedule.lr_decay_iters=10", "checkpoint.load=none"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    outputs = []
    for count, iterations in (("", 3), ("1", 6), ("2", 8)):
        if count:
            monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        with started([*command, f"train.train_iters={iterations}"], tmp_path) as process:
            outputs.append(process.communicate(timeout=TIMEOUT_S)[0])
        assert process.returncode == 0, outputs[-1]
    assert "starting fresh" in outputs[0]
    assert "iteration 3 from" in outputs[1]
    assert "iteration 6 from" in outputs[2]
    assert not list((tmp_path / "run/checkpoints").glob("*.superseded-*"))
    assert [row[0] for row in curve(tmp_path / "run")] == list(range(1, 9))


def test_the_job_is_a_script_that_bash_understands() -> None:
    subprocess.run(["bash", "-n", str(JOB)], check=True)
