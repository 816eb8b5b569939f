"""The commands as a user types them: `python -m trainer` and `torchrun -m trainer`, from any folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from scripts.faults.job import descendants
from tests.harness import DEADLINE_S, TINY, curve, last_iteration, run_ok
from tests.profiles import nightly
from tests.resume.starts import REFERENCE

BASE = ["model=gpt2_tiny", *TINY, "train.train_iters=30", "checkpoint.save_interval=5"]
PYTHON = [sys.executable, "-m", "trainer"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
ROOT = Path(__file__).parents[2]


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command in `folder`, in a session of its own, and end all of it afterwards."""
    process = subprocess.Popen(
        command, cwd=folder, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        for pid in (process.pid, *descendants(process.pid)):
            kill(pid)
        process.communicate()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def workers(pid: int) -> list[int]:
    """Return the ranks below a torchrun process."""
    return [child for child in descendants(pid) if variables(child).get("WORLD_SIZE")]


def await_iteration(process: subprocess.Popen[str], metrics: Path, iteration: int, *, saved: int) -> None:
    """Return as soon as an iteration and a save are recorded; fail if the process ends first or takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while last_iteration(metrics) < iteration or last_iteration(metrics, "save") < saved:
        assert time.monotonic() < deadline
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
        assert process.returncode is None


def variables(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def said(command: list[str], folder: Path) -> tuple[int, str]:
    """Return the exit status and the output of a command in a folder."""
    with started(command, folder) as process:
        text, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, text


@pytest.mark.slow
def test_a_refusal_ends_every_rank_soon_with_its_message(tmp_path: Path) -> None:
    source = tmp_path / "source"
    run_ok(source, REFERENCE, ranks=2)
    load = f"checkpoint.load={source / 'checkpoints'}"
    command = [*TORCHRUN, "-m", "trainer", "run.dir=run", *REFERENCE, load, "train.seed=7"]
    status, text = said(command, tmp_path)
    assert status != 0
    assert "checkpoint.override_data=true" in text
    last = "".join(text.splitlines(keepends=True)[-10:])  # as `| tail` shows
    assert "train.seed  saved 1234  current 7" in last
    assert str(source) in last
    assert "To continue anyway, set checkpoint.allow=data." in last
    assert text.count("current 7") == 2  # in the message, and in torchrun's report
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, nightly(signal.SIGINT)])
def test_a_saved_run_says_so_before_torchrun_ends(number: signal.Signals, tmp_path: Path) -> None:
    endless = ["train.train_iters=100000", "schedule.lr_decay_iters=30"]
    with started([*TORCHRUN, "-m", "trainer", "run.dir=run", *BASE, *endless], tmp_path) as torchrun:
        await_iteration(torchrun, tmp_path / "run/metrics.jsonl", 2, saved=0)
        torchrun.send_signal(number)
        text, _ = torchrun.communicate(timeout=DEADLINE_S)
    (newest,) = sorted((tmp_path / "run/checkpoints").glob("iter_*"))[-1:]
    line = f"the run is saved at iteration {int(newest.name[5:])} in run/checkpoints"
    assert text.count(line) == 1
    assert text.index(line) < text.index("SignalException")


def test_plain_python_trains_and_resumes_from_any_folder(tmp_path: Path) -> None:
    command = [*PYTHON, "run.name=plain", *BASE, "schedule.lr_decay_iters=30"]
    for iterations in (3, 5):
        status, text = said([*command, f"train.train_iters={iterations}"], tmp_path)
        assert status == 0, text
        (line,) = re.findall(r"started in .*", text)
        assert re.sub(r"\d+\.\d", "_", line) == "started in _ s: imports _, rendezvous _, data _, build _, load _"
    assert "iteration 3 from" in text
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    run = tmp_path / "runs/plain"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "start" in row] == [1, 4]
    left = ["checkpoints", "config.yaml", "launches.jsonl", "lock", "metrics.jsonl", "run.json"]
    assert sorted(path.name for path in run.iterdir()) == left
    assert [row[0] for row in curve(run)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("overrides", "places"),
    [
        (["parallel.zero_stage=4", "train.global_batch_size=7"], ["train.global_batch_size=7", "zero_stage=4"]),
        pytest.param(["train.train_itres=7"], ["train_itres"], marks=pytest.mark.slow),
        pytest.param(["run.dir=run", "checkpoint.save=/proc/x"], ["/proc", "checkpoint.save"], marks=pytest.mark.slow),
        pytest.param(
            ["parallel=tp2", "run.name=a b"],
            ["parallel.tensor_model_parallel_size=2", "`torchrun --no-python --nproc-per-node 2`"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["impossible", "unknown", "a folder that no program can create", "one process"],
)
def test_what_cannot_be_is_one_paragraph(tmp_path: Path, overrides: list[str], places: list[str]) -> None:
    status, text = said([*PYTHON, *BASE, *overrides], tmp_path)
    assert status == 1
    assert all(place in text for place in places), text
    assert "Traceback" not in text
    assert not list(tmp_path.rglob("iter_*"))
