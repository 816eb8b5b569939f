"""A run that trains, is killed and goes on has each iteration once in the tracker that `logging.publish` names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import TINY, curve, launch, run_ok
from tests.published_runs import fake_trackio, tracked

BASE = [
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=12",
    "train.eval_interval=4",
    "train.eval_iters=1",
    "checkpoint.save_interval=4",
    "logging.publish=trackio",
]
# Waits for the lock of the publishers, which end after their runs.
WAIT = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX)"
DEADLINE_S = 300


@pytest.mark.slow
def test_a_run_that_is_killed_is_published_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_trackio(tmp_path).items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    assert launch(run, BASE, kill_after=6, saved=4).statuses == (-9,)
    assert launch(run, BASE, kill_after=10, saved=8).statuses == (-9,)
    run_ok(run, BASE)
    lock = run / "publish/trackio/lock"
    subprocess.run([sys.executable, "-c", WAIT, str(lock)], timeout=DEADLINE_S, check=True)
    command = [sys.executable, "-m", "reprise", "publish", str(run), "--to", "trackio"]
    subprocess.run(command, timeout=DEADLINE_S, check=True)
    curves = tracked(tmp_path)
    assert [(step, loss.hex()) for step, loss in curves["train/loss"].items()] == [
        (row[0], row[1]) for row in curve(run)
    ]
    assert [*curves["valid/loss"]] == [*curves["save/seconds"]] == [4, 8, 12]
