"""One job writes to a run's folder, wherever its checkpoints go: a second one is refused before it changes anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.crash.moments import standing
from tests.harness import DEADLINE_S, TINY, all_files, curve, launch, run_ok

INLINE = "checkpoint.async_save=false"
BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=4", "checkpoint.save_interval=2", INLINE)


@pytest.mark.parametrize(
    "elsewhere",
    ["checkpoint.save=null", pytest.param("checkpoint.save={}", marks=pytest.mark.slow)],
    ids=["no checkpoints", "other checkpoints"],
)
def test_a_second_job_with_the_same_run_folder_is_refused(tmp_path: Path, elsewhere: str) -> None:
    run = tmp_path / "run"
    second = [*BASE, f"run.dir={run}", "checkpoint.load=none", elsewhere.format(tmp_path / "other")]
    with standing(run, BASE, moment="step", iteration=3) as (running, gate):
        gate.await_reached()
        before = all_files(run)
        ended = launch(tmp_path / "second", second)
        assert ended.statuses == (1,), ended.text
        assert f"LockError: Another job writes to this run folder ({run})" in ended.text
        assert f"host {socket.gethostname()}, pid {running.processes[0].pid}" in ended.text
        assert "another folder with run.name or run.dir" in ended.text
        assert all_files(run) == before
        assert not (tmp_path / "other").exists()
        gate.open()
        running.join(DEADLINE_S)
    assert running.ended().ok, running.ended().text
    assert [row[0] for row in curve(run)] == [1, 2, 3, 4]
    assert (run / "lock").read_bytes() == b""
    assert (run / "checkpoints/lock").read_bytes() == b""


def test_checkpoints_in_the_run_s_own_folder_share_its_lock(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ok(run, [*BASE, f"checkpoint.save={run}"])
    assert sorted(path.name for path in run.iterdir() if path.is_file()) == [
        "config.yaml",
        "latest_checkpointed_iteration.txt",
        "launches.jsonl",
        "lock",
        "metrics.jsonl",
        "run.json",
    ]


@pytest.mark.slow
def test_a_run_whose_folder_cannot_be_made_says_so_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = [*BASE, f"checkpoint.save={tmp_path / 'other'}", f"run.dir={tmp_path / 'file' / 'run'}"]
    ended = launch(tmp_path / "log", arguments, ranks=2)
    assert ended.statuses == (1, 1), ended.text
    assert all("The run's folder cannot be written: Not a directory" in output for output in ended.outputs)
    assert not (tmp_path / "other").exists()
