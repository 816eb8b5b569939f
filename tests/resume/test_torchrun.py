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

from scripts.faults.soak_kill import descendants
from tests.harness import TINY, curve, last_iteration, run_ok

BASE = ["model=gpt2_tiny", *TINY, "train.train_iters=30", "checkpoint.save_interval=5"]
PYTHON = [sys.executable, "-m", "trainer"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
TIMEOUT_S = 300.0
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
    deadline = time.monotonic() + TIMEOUT_S
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


def records(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run on two ranks."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run_ok(folder, BASE, ranks=2)
    return folder


def test_a_refusal_ends_every_rank_soon_with_its_message(unbroken: Path, tmp_path: Path) -> None:
    load = f"checkpoint.load={unbroken / 'checkpoints'}"
    with started([*TORCHRUN, "-m", "trainer", "run.dir=run", *BASE, load, "train.seed=7"], tmp_path) as torchrun:
        text, _ = torchrun.communicate(timeout=TIMEOUT_S)
    assert torchrun.returncode != 0
    assert "train.seed  saved 1234  current 7" in text
    assert "checkpoint.override_data=true" in text
    last = "".join(text.splitlines(keepends=True)[-10:])  # as `| tail` shows
    assert "train.seed  saved 1234  current 7" in last
    assert (
        "continue with the run's own configuration: `torchrun --no-python --nproc-per-node 2 reprise train run.dir=run"
        in last
    )
    assert f"{load} train.train_iters=N`" in last.replace("/checkpoints ", " ") or str(unbroken) in last
    assert text.count("current 7") == 2  # in the message, and in torchrun's report
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_saved_run_says_so_before_torchrun_ends(number: signal.Signals, tmp_path: Path) -> None:
    endless = ["train.train_iters=100000", "schedule.lr_decay_iters=30"]
    with started([*TORCHRUN, "-m", "trainer", "run.dir=run", *BASE, *endless], tmp_path) as torchrun:
        await_iteration(torchrun, tmp_path / "run/metrics.jsonl", 2, saved=0)
        torchrun.send_signal(number)
        text, _ = torchrun.communicate(timeout=TIMEOUT_S)
    (newest,) = sorted((tmp_path / "run/checkpoints").glob("iter_*"))[-1:]
    line = f"the run is saved at iteration {int(newest.name[5:])} in run/checkpoints; the same command resumes it"
    assert text.count(line) == 1
    assert text.index(line) < text.index("SignalException")


def test_one_process_for_several_ranks_is_given_the_command(tmp_path: Path) -> None:
    with started([*PYTHON, *BASE, "parallel=tp2", "run.name=a b"], tmp_path) as process:
        text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    words = " ".join([*BASE, "parallel=tp2", "'run.name=a b'"])
    assert text.startswith("ConfigError: ")
    assert f"start it with `torchrun --no-python --nproc-per-node 2 reprise train {words}`\n" in text


def test_a_folder_that_no_program_can_create_is_called_so(tmp_path: Path) -> None:
    with started([*PYTHON, *BASE, "run.dir=run", "checkpoint.save=/proc/foo"], tmp_path) as process:
        text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    last = text.splitlines()[-1]
    assert "The checkpoint folder cannot be created: the file system of /proc refuses it" in last
    assert last.endswith("or name another folder with run.name or checkpoint.save.")


def test_plain_python_trains_and_resumes_from_any_folder(tmp_path: Path) -> None:
    command = [*PYTHON, "run.name=plain", *BASE, "schedule.lr_decay_iters=30"]
    for iterations in (3, 5):
        with started([*command, f"train.train_iters={iterations}"], tmp_path) as process:
            text, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, text
        (line,) = re.findall(r"started in .*", text)
        assert re.sub(r"\d+\.\d", "_", line) == ("started in _ s: imports _, rendezvous _, data _, build _, load _")
    assert "iteration 3 from" in text
    assert [record["iteration"] for record in records(tmp_path / "runs/plain") if "start" in record] == [1, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    run = tmp_path / "runs/plain"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "launches.jsonl",
        "lock",
        "metrics.jsonl",
        "run.json",
    ]
    assert [row[0] for row in curve(run)] == [1, 2, 3, 4, 5]


def test_an_impossible_configuration_is_one_paragraph(tmp_path: Path) -> None:
    with started([*PYTHON, *BASE, "train.global_batch_size=7", "parallel.zero_stage=4"], tmp_path) as process:
        text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert text.startswith("ConfigError: The configuration cannot run:\n")
    assert "train.global_batch_size=7" in text
    assert "parallel.zero_stage=4" in text
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    with started([*PYTHON, *BASE, "train.train_itres=7"], tmp_path) as process:
        text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "train_itres" in text
    assert list(tmp_path.iterdir()) == []
