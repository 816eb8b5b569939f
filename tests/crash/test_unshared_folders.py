"""Hosts that see different folders under one path: nothing is saved, loaded or trained from such a mixture."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reprise.format import MANIFEST, STATE
from reprise.loading import open_checkpoint, verify_tensors
from reprise.storage import Files
from tests.crash.hosts import Mount, on_hosts, run_trainer
from tests.crash.moments import Gate, await_true, describe, train_with_gate
from tests.crash.outcomes import assert_ends_as
from tests.harness import TINY, Ended, all_files, call_on_ranks, checkpoint, run_ok, started
from tests.profiles import NIGHTLY

pytestmark = NIGHTLY

BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=4", "checkpoint.save_interval=2")
ZERO3 = "parallel.zero_stage=3"
UNSEEN = "This host does not see the checkpoint folder of rank 0"
# A run that cannot go on ends in 15 s; the rest is for a machine that is busy.
BOUND_S = 200.0


def names_in(*folders: Path) -> list[list[str]]:
    return [sorted(path.name for path in folder.iterdir()) for folder in folders]


def train_apart(run: Path, *overrides: str, mount: Mount) -> Ended:
    """Train on two hosts, of which the second has a mount, to the end."""
    arguments = [f"run.dir={run}", *BASE, *overrides]
    return call_on_ranks(on_hosts(run_trainer, {1: [mount]}), arguments, folder=run.with_name("ended"), ranks=2)


@pytest.mark.parametrize(
    ("topology", "is_empty"), [("parallel.zero_stage=1", True), (ZERO3, False), ("parallel=tp2", False)]
)
def test_a_host_that_loses_the_folder_fails_the_save_cleanly(tmp_path: Path, topology: str, is_empty: bool) -> None:
    whole, run, other = tmp_path / "whole", tmp_path / "run", tmp_path / "other"
    checkpoints = run / "checkpoints"
    other.mkdir()
    run_ok(whole, [*BASE, topology], ranks=2)
    gate = Gate.at(tmp_path / "gate", "step", 4, (0, 1))
    arguments = [describe([gate]), f"run.dir={run}", *BASE, topology]
    with started(on_hosts(train_with_gate, {}), arguments, folder=run, ranks=2) as running:
        gate.await_reached()
        await_true(checkpoint(run, 2).exists)
        Mount(checkpoints, None if is_empty else other).make_in(running.processes[1].pid)
        gate.open()
        running.join(BOUND_S)
    ended = running.ended()
    for path in checkpoints.glob("iter_*"):
        found = open_checkpoint(path, Files())
        verify_tensors(found)
    assert ended.statuses == (1, 1), ended.text
    assert f"iteration 4 was not saved: Rank 1: {UNSEEN} (host host1, {checkpoints}/.iter_0000004." in ended.outputs[0]
    assert names_in(checkpoints, other) == [["iter_0000002", "latest_checkpointed_iteration.txt", "lock"], []]
    run_ok(run, [*BASE, topology], ranks=2)
    assert_ends_as(run, whole)
    assert all_files(checkpoint(run, 4)).keys() == all_files(checkpoint(whole, 4)).keys()


def test_hosts_with_different_weights_at_one_path_do_not_train(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_ok(whole, [*BASE, ZERO3], ranks=2)
    ours, theirs, copy = (tmp_path / f"model{number}" for number in range(3))
    for folder, iteration in ((ours, 2), (theirs, 4), (copy, 2)):  # what transformers reads of them
        ignored = shutil.ignore_patterns(MANIFEST, STATE, "optimizer")
        shutil.copytree(checkpoint(whole, iteration), folder, ignore=ignored)
    begins = (ZERO3, f"checkpoint.load={ours}", "checkpoint.finetune=true")
    ended = train_apart(run, *begins, mount=Mount(ours, theirs))
    assert ended.statuses == (1, 1), ended.text
    assert all(f"(host host1, {ours})" in output for output in ended.outputs)
    assert "step     1/" not in ended.text
    ended = train_apart(run, *begins, mount=Mount(ours, copy))
    assert ended.ok, ended.text
