"""A store host that is stopped, not killed: all ranks end in bounded time, what is committed stays, the run goes on."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.faults.soak_kill import descendants
from tests.crash.moments import Gate, await_true, describe, standing
from tests.harness import TINY, all_files, curve, run_ok, tensor_files
from tests.resume.test_torchrun import TORCHRUN, kill, workers

ROOT = Path(__file__).parents[2]
ITERATIONS = 12
BASE = (
    "model=gpt2_tiny",
    *TINY,
    "model.dropout=0.1",
    f"train.train_iters={ITERATIONS}",
    "checkpoint.save_interval=4",
)
TIMEOUT_S = 12.0
TIMEOUT = f"train.distributed_timeout_minutes={TIMEOUT_S / 60}"
# What has not ended by then hangs; that a timeout has ended it is seen from what it says.
BOUND_S = TIMEOUT_S + 200.0
FIRST = "checkpoints/iter_0000004"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run that nobody stops."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    run_ok(run, BASE, ranks=2)
    return run


def assert_goes_on(run: Path, whole: Path) -> None:
    """Resume a run, on the folder as it lies, and hold it to the unbroken one, bit by bit."""
    committed = sorted(path.name for path in (run / "checkpoints").glob("iter_*"))
    for name in committed:
        assert tensor_files(run / "checkpoints" / name) == tensor_files(whole / "checkpoints" / name)
    resumed = run_ok(run, BASE, ranks=2)
    assert f"iteration {int(committed[-1][5:])} from" in resumed.outputs[0]
    assert curve(run) == curve(whole)
    last = f"checkpoints/iter_{ITERATIONS:07d}"
    assert tensor_files(run / last) == tensor_files(whole / last)


# Where rank 0 is stopped: while it trains, while its own part of the second save is not durable, and while it is the
# only one left to do something for that save.
MOMENTS = [
    pytest.param("forward", 7, id="forward"),
    pytest.param("save", 8, id="save", marks=pytest.mark.nightly),
    pytest.param("prepare", 8, id="prepare", marks=pytest.mark.nightly),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("moment", "iteration"), MOMENTS)
def test_a_stopped_rank_0_ends_all_ranks_and_the_run_resumes(
    unbroken: Path, tmp_path: Path, moment: str, iteration: int
) -> None:
    run = tmp_path / "run"
    at = standing(run, [*BASE, TIMEOUT], moment=moment, iteration=iteration, ranks=2, gated=[0])
    with at as (running, gate):
        gate.await_reached()
        await_true((run / FIRST).exists)
        before = all_files(run / FIRST)
        running.send(0, signal.SIGSTOP)
        running.join(BOUND_S, but=[0])
        assert running.processes[0].exitcode is None
        gate.open()
        running.send(0, signal.SIGCONT)
        running.join(BOUND_S)
    ended = running.ended()
    assert ended.statuses == (1, 1), ended.text
    assert "rank 1 exits: the store's host, rank 0, has not answered" in ended.outputs[1]
    assert "Rank 1 does not answer: it was killed or is hung" in ended.outputs[0]
    assert all_files(run / FIRST) == before
    assert_goes_on(run, unbroken)


@contextmanager
def torchrun(run: Path, gate: Gate, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start two ranks with a gate under torchrun, whose agent hosts the store, and end all of it afterwards."""
    Path(gate.folder).mkdir()
    ranks = ["-m", "tests.crash.moments", describe([gate]), f"run.dir={run}", *BASE, TIMEOUT]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*TORCHRUN, *ranks], cwd=ROOT, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        for pid in (process.pid, *descendants(process.pid)):
            kill(pid)
        process.wait()


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or waits for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(("moment", "iteration"), MOMENTS[::2])
def test_a_stopped_torchrun_agent_ends_all_and_the_run_resumes(
    unbroken: Path, tmp_path: Path, moment: str, iteration: int
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    gate = Gate(str(tmp_path / "gate"), moment, iteration, (0,))
    with torchrun(run, gate, log) as agent:
        await_true(lambda: Path(gate.folder, "reached.0").exists() or agent.poll() is not None)
        await_true(lambda: (run / FIRST).exists() or agent.poll() is not None)
        ranks = workers(agent.pid)
        assert len(ranks) == 2, log.read_text()
        before = all_files(run / FIRST)
        agent.send_signal(signal.SIGSTOP)
        gate.open()
        await_true(lambda: all(map(has_ended, ranks)))
        agent.send_signal(signal.SIGCONT)
        assert agent.wait(BOUND_S) == 1, log.read_text()
    text = log.read_text()
    assert "the store's host, torchrun's agent on the first node, has not answered" in text
    assert "exitcode  : 1 (pid:" in text
    assert all_files(run / FIRST) == before
    assert_goes_on(run, unbroken)
