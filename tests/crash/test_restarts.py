"""torchrun's jobs whose workers or hosts are killed: started again by torchrun, they go on by themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from scripts.faults.ranks import free_port
from scripts.faults.soak_kill import descendants
from tests.crash.moments import KILLED, Gate, describe
from tests.harness import TINY, curve, run_ok, tensor_files

pytestmark = pytest.mark.slow

ITERATIONS = 10
GLOBAL_BATCH = 12  # see TINY
BASE = (
    "model=gpt2_tiny",
    *TINY,
    f"train.train_iters={ITERATIONS}",
    "checkpoint.save_interval=2",
    "train.distributed_timeout_minutes=0.5",
)
LAST = f"checkpoints/iter_{ITERATIONS:07d}"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TIMEOUT_S = 300.0


@contextmanager
def started(options: Sequence[str], gates: Sequence[Gate], run: Path, overrides: Sequence[str]) -> Iterator[Agent]:
    """Start a torchrun whose workers have gates, and end all of it afterwards."""
    command = [*TORCHRUN, *options, "-m", "tests.crash.moments", describe(gates), f"run.dir={run}", *overrides]
    run.parent.mkdir(parents=True, exist_ok=True)
    output = run.with_name(f"agent{len(list(run.parent.glob('agent*')))}.log")
    with output.open("wb") as log:
        process = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=subprocess.STDOUT)
    agent = Agent(process, output)
    try:
        yield agent
    finally:
        agent.kill()


class Agent:
    """A torchrun that was started."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process, self._output = process, output

    def kill(self) -> None:
        """End it and its workers with SIGKILL at once, as when a host is lost."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)
            for pid in (self._process.pid, *descendants(self._process.pid)):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def finish(self) -> tuple[int, str]:
        """Wait for its end and return status and output."""
        status = self._process.wait(TIMEOUT_S)
        return status, self._output.read_text()


def gate(folder: Path, moment: str, iteration: int, ranks: Sequence[int], **deed: str) -> Gate:
    folder.mkdir()
    return Gate(str(folder), moment, iteration, tuple(ranks), **deed)


# When iteration 5 begins, so has the save of iteration 4, for which that of iteration 2 has ended.
@pytest.mark.parametrize(
    ("topology", "kills"),
    [
        pytest.param([], [("forward", 5, 1)], id="dp2"),
        pytest.param([], [("forward", 5, 1), ("step", 7, 0)], id="dp2, twice", marks=pytest.mark.nightly),
        pytest.param(["parallel.tensor_model_parallel_size=2"], [("step", 5, 0)], id="tp2", marks=pytest.mark.nightly),
    ],
)
def test_a_job_restarted_by_torchrun_ends_as_the_unbroken_one(
    tmp_path: Path, topology: list[str], kills: list[tuple[str, int, int]]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_ok(whole, [*BASE, *topology], ranks=2)
    gates = [gate(tmp_path / f"kill{at}", moment, at, [rank], deed=KILLED) for moment, at, rank in kills]
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    with started(options, gates, run, [*BASE, *topology]) as agent:
        status, text = agent.finish()
    assert status == 0, text
    assert all(list(Path(each.folder).glob("reached.*")) for each in gates)
    assert text.count("starting fresh") == 1
    assert text.count("tensors, ") == len(kills)  # loaded by each that came after
    starts = [line for line in text.splitlines() if "started in " in line]
    assert ["torchrun" in line for line in starts] == [True, *[False] * len(kills)]  # its start, not of the restarts
    assert curve(run) == curve(whole)
    assert tensor_files(run / LAST) == tensor_files(whole / LAST)


def superseded(run: Path) -> list[str]:
    """Return the checkpoints that are out of the way."""
    return sorted(path.name for path in (run / "checkpoints").glob("*.superseded-*"))


# What the command says of the beginning, the workers, and the earlier run's checkpoints that it puts out of the way.
BEGINNINGS = [
    pytest.param("checkpoint.load=none", 2, (2, 4, 6), id="none-2", marks=pytest.mark.nightly),
    pytest.param("checkpoint.load=none", 1, (2, 4, 6), id="none-1"),
    pytest.param("checkpoint.ckpt_step=2", 2, (4, 6), id="ckpt_step-2", marks=pytest.mark.nightly),
    pytest.param("checkpoint.load={run}/checkpoints/iter_0000002", 1, (4, 6), id="path-1", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("beginning", "workers", "abandoned"), BEGINNINGS)
def test_what_a_command_says_of_the_beginning_acts_once_a_launch(
    tmp_path: Path, beginning: str, workers: int, abandoned: tuple[int, ...]
) -> None:
    run = tmp_path / "run"
    run_ok(run, [*BASE, "train.train_iters=6", f"schedule.lr_decay_iters={ITERATIONS}"], ranks=workers)
    kill = gate(tmp_path / "kill", "forward", 7, [workers - 1], deed=KILLED)
    options = ["--standalone", "--nproc-per-node", str(workers), "--max-restarts", "1"]
    command = [*BASE, beginning.format(run=run), f"schedule.lr_decay_iters={ITERATIONS}"]
    with started(options, [kill], run, command) as agent:
        status, text = agent.finish()
    assert status == 0, text
    assert list(Path(kill.folder).glob("reached.*"))
    assert "this launch was restarted: it resumes from its own newest checkpoint" in text
    # Iteration 4 is there for certain once the seventh begins, that of 6 perhaps.
    assert re.search("iteration (4|6) from", text), text
    once = [f"iter_{number:07d}.superseded-1" for number in abandoned]
    assert superseded(run) == once
    assert [row[0] for row in curve(run)] == list(range(1, ITERATIONS + 1))

    # A launch of its own does what its command says.
    with started(options, [], run, command) as agent:
        status, text = agent.finish()
    assert status == 0, text
    assert "this launch was restarted" not in text
    assert len(superseded(run)) > len(once)


def fed(folder: Path, first: int, last: int, world_size: int) -> list[int]:
    """Return the positions of the samples that the ranks were fed in some iterations."""
    rows = [json.loads(line) for path in folder.glob("fed.*") for line in path.read_text().splitlines()]
    return [
        position
        for row in rows
        if row["world_size"] == world_size and first <= row["iteration"] <= last
        for position in row["positions"]
    ]


def test_a_job_without_a_lost_host_ends_as_the_unbroken_one(tmp_path: Path) -> None:
    whole, run, gates = tmp_path / "whole", tmp_path / "run", tmp_path / "gates"
    # A host alone has all cores for its one rank, so its number of threads is fixed.
    base = [*BASE, "model.dropout=0.1", "train.threads=1", "parallel.invariant_ranks=2"]
    run_ok(whole, base, ranks=2)
    stand = gate(gates, "forward", 6, [0, 1])
    notes = gate(tmp_path / "fed", "feed", 0, [0, 1])
    times = "is_host={},last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-id", "elastic", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf"]
    overrides = [*base, "checkpoint.reshard=true"]
    with ExitStack() as stack:
        stays, lost = (
            stack.enter_context(started([*options, times.format(is_host)], [stand, notes], run, overrides))
            for is_host in (1, 0)
        )
        stand.await_reached()
        lost.kill()
        stand.open()
        status, text = stays.finish()
    assert status == 0, text
    assert "topology.world_size: saved 2, now 1" in text
    rows = curve(run)
    assert [(row[0], row[4]) for row in rows] == [(n, GLOBAL_BATCH * n) for n in range(1, ITERATIONS + 1)]
    assert rows == curve(whole)
    assert tensor_files(run / LAST) == tensor_files(whole / LAST)
    # Of two hosts to the checkpoint that was loaded, of one after it.
    came_back = int(text.split(": iteration ")[-1].split()[0])
    consumed = [*fed(tmp_path / "fed", 1, came_back, 2), *fed(tmp_path / "fed", came_back + 1, ITERATIONS, 1)]
    assert sorted(consumed) == list(range(GLOBAL_BATCH * ITERATIONS))
