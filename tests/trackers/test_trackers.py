"""The real trackers, without a network: each has every iteration of a run once, with its bits, after all that happens.

Every publisher is a process of its own, as in use. `make test-trackers` installs the packages; a test of an absent one
is skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.published_runs import LoggedRun, MemoryTracker, losses, publish
from tests.trackers.readers import READERS, Curves

# `tests/unit/publish` has the same promises of a tracker in memory.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_S = 500
PACKAGES = {"mlflow": "mlflow.tracking"}
# Sends all that is new, and dies before the tracker is closed.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.published_runs import publisher
from trainer.publish.tracker import load_tracker
sender = publisher(Path(sys.argv[1]), load_tracker(sys.argv[2]), sys.argv[2], project="reprise")
sender.send()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=sorted(READERS))
def tracker(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(PACKAGES.get(name, name))
    return name


class Processes:
    """Publishers of one tracker, whose store is outside of the run's folder where the tracker has one."""

    def __init__(self, tracker: str, store: Path) -> None:
        self.tracker, self.store = tracker, store
        store.mkdir(exist_ok=True)
        self.environment = {
            **os.environ,
            "WANDB_MODE": "offline",
            "SWANLAB_MODE": "local",
            "MLFLOW_TRACKING_URI": f"sqlite:///{store}/mlflow.db",
            "TRACKIO_DIR": str(store),
            "HOME": str(store),
            "PYTHONPATH": str(ROOT),
        }

    def publish(self, run: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "reprise", "publish", str(run), "--to", self.tracker, "--name", "run"]
        return self._run(command, variables)

    def kill(self, run: Path) -> None:
        ended = self._run([sys.executable, "-c", KILLED, str(run), self.tracker], {})
        assert ended.returncode == -signal.SIGKILL, ended.stderr

    def _run(self, command: list[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**self.environment, **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def curves(self, run: Path) -> dict[str, Curves]:
        """Return what the tracker keeps, in order of iteration."""
        runs = READERS[self.tracker](run, self.store)
        return {run_id: {name: sorted(points) for name, points in curves.items()} for run_id, curves in runs.items()}


def expected(run: Path) -> dict[str, Curves]:
    """Return the curves of a log, by way of a tracker in memory that has seen the run once."""
    memory = MemoryTracker()
    publish(run, memory)
    runs: dict[str, Curves] = {}
    for run_id, points in memory.rows.items():
        curves = runs.setdefault(run_id, defaultdict(list))
        for point in points:
            for name, value in point.figures.items():
                curves[name].append((point.iteration, float(value).hex()))
    return {run_id: {name: sorted(points) for name, points in curves.items()} for run_id, curves in runs.items()}


def test_every_iteration_is_there_once_whatever_happens(tracker: str, tmp_path: Path) -> None:
    processes = Processes(tracker, tmp_path / "store")
    run = LoggedRun(tmp_path / "run")
    run.start(0)
    run.train(1, 25)
    processes.kill(run.folder)
    run.train(26, 40)
    processes.kill(run.folder)
    assert processes.publish(run.folder).returncode == 0
    run.kill()  # and the run goes on from its checkpoint, elsewhere
    moved = LoggedRun(tmp_path / "elsewhere")
    shutil.move(run.folder, moved.folder)
    moved.start(30)
    moved.train(31, 45)
    processes.kill(moved.folder)
    moved.train(46, 3700)  # an hour of steps
    ended = processes.publish(moved.folder)
    assert ended.returncode == 0, ended.stderr
    assert list(processes.curves(moved.folder)) == ["a1b2c3"]
    first_branch = expected(moved.folder)
    moved.start(35, branch_id="b1")
    moved.train(36, 50, branch=1)
    processes.kill(moved.folder)
    assert processes.publish(moved.folder).returncode == 0
    assert processes.publish(moved.folder).returncode == 0

    curves = processes.curves(moved.folder)
    logged = first_branch | expected(moved.folder)
    for runs in (curves, logged):  # the first line of an iteration stays, which is of the launch before
        runs["a1b2c3"].pop("train/resumed", None)
    assert curves == logged
    assert dict(curves["a1b2c3"]["train/loss"]) == losses(1, 3700)
    assert dict(curves["a1b2c3-1"]["train/loss"]) == losses(1, 35) | losses(36, 50, branch=1)


def test_a_follower_that_is_ended_has_sent_all(tracker: str, tmp_path: Path) -> None:
    processes = Processes(tracker, tmp_path / "store")
    run = LoggedRun(tmp_path / "run")
    run.start(0)
    run.train(1, 25)
    command = [sys.executable, "-m", "reprise", "publish", str(run.folder), "--to", tracker, "--follow"]
    follower = subprocess.Popen(
        [*command, "--until-input-ends"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=processes.environment,
        cwd=ROOT,
    )
    try:
        run.train(26, 60)
        _, errors = follower.communicate(timeout=DEADLINE_S)  # which closes its input, as the end of a run does
    finally:
        follower.kill()
        follower.wait()
    assert follower.returncode == 0, errors.decode()
    assert processes.curves(run.folder) == expected(run.folder)


def test_a_store_that_mlflow_refuses_is_told_with_its_fix(tmp_path: Path) -> None:
    pytest.importorskip("mlflow.tracking")
    processes = Processes("mlflow", tmp_path / "store")
    run = LoggedRun(tmp_path / "run")
    run.start(0)
    run.train(1, 3)
    ended = processes.publish(run.folder, MLFLOW_TRACKING_URI=f"file://{tmp_path}/mlruns")
    assert ended.returncode == 1
    assert "MLFLOW_ALLOW_FILE_STORE" in ended.stderr


def test_an_unreachable_mlflow_server_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mlflow.tracking")
    processes = Processes("mlflow", tmp_path / "store")
    run = LoggedRun(tmp_path / "run")
    run.start(0)
    run.train(1, 25)
    ended = processes.publish(run.folder, MLFLOW_TRACKING_URI="http://127.0.0.1:9", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert ended.returncode == 1
    assert "the tracker does not take the run: MlflowException" in ended.stderr
    assert processes.publish(run.folder).returncode == 0
    assert processes.curves(run.folder) == expected(run.folder)
