"""A store host that is stopped, not killed: all ranks end in bounded time, what is committed stays, the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.crash.moments import Gate, await_true
from tests.crash.outcomes import assert_ends_as
from tests.crash.torchrun import TWO_RANKS, torchrun
from tests.harness import TINY, all_files, checkpoint, run_ok
from tests.profiles import nightly, slow
from tests.resume.test_torchrun import workers

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "model.dropout=0.1",
    "train.train_iters=12",
    "checkpoint.save_interval=4",
)
TIMEOUT_S = 12.0
TIMEOUT = f"train.distributed_timeout_minutes={TIMEOUT_S / 60}"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run that nobody stops."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    run_ok(run, BASE, ranks=2)
    return run


def assert_goes_on(run: Path, whole: Path) -> None:
    """Resume a run, on the folder as it lies, and hold it to the unbroken one, bit by bit."""
    newest = max((run / "checkpoints").glob("iter_*")).name
    resumed = run_ok(run, BASE, ranks=2)
    assert f"iteration {int(newest[5:])} from" in resumed.outputs[0]
    assert_ends_as(run, whole)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or waits for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(("moment", "iteration"), [slow("forward", 7), nightly("prepare", 8)])
def test_a_stopped_torchrun_agent_ends_all_and_the_run_resumes(
    unbroken: Path, tmp_path: Path, moment: str, iteration: int
) -> None:
    run = tmp_path / "run"
    gate = Gate.at(tmp_path / "gate", moment, iteration, (0,))
    with torchrun(TWO_RANKS, [gate], run, [*BASE, TIMEOUT]) as agent:
        gate.await_reached()
        await_true(checkpoint(run, 4).exists)
        ranks = workers(agent.process.pid)
        assert len(ranks) == 2
        before = all_files(checkpoint(run, 4))
        agent.process.send_signal(signal.SIGSTOP)
        gate.open()
        await_true(lambda: all(map(has_ended, ranks)))
        agent.process.send_signal(signal.SIGCONT)
        status, text = agent.finish()
    assert status == 1, text
    assert "torchrun's agent on the first node, has not answered" in text
    assert "exitcode  : 1 (pid:" in text
    assert all_files(checkpoint(run, 4)) == before
    assert_goes_on(run, unbroken)
