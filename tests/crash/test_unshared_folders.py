"""Hosts that see different folders under one path: nothing is saved, loaded or trained from such a mixture."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import reprise
from reprise.errors import CheckpointError
from reprise.format import MANIFEST, STATE
from reprise.format.manifest import digest_of
from reprise.loading import open_checkpoint, read_places, verify_share
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


@pytest.mark.parametrize("has_folder", [False, True], ids=["no such folder", "such a folder"])
def test_hosts_without_a_shared_checkpoint_folder_do_not_start(tmp_path: Path, has_folder: bool) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    checkpoints = shared / "run/checkpoints"
    shared.mkdir()
    (other / "run/checkpoints" if has_folder else other).mkdir(parents=True)
    ended = train_apart(shared / "run", mount=Mount(shared, other))
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert f"{UNSEEN} (host host1, {checkpoints})" in output
        assert "checkpoint.local.dir=FOLDER" in output
        assert "checkpoint.save=null" in output
    assert "step     1/" not in ended.text
    # The lock is let go of, and the file by which it was found out is gone.
    assert all_files(checkpoints) == {"lock": b""}
    assert names_in(*other.rglob("checkpoints")) == ([[]] if has_folder else [])


def save_a_module(arguments: list[str]) -> None:
    """Save with the library, on two ranks that have the same module."""
    dist.init_process_group("gloo")
    try:
        reprise.save(arguments[0], torch.nn.Linear(3, 2, bias=False), iteration=1)
    except CheckpointError as error:
        print(error)
    dist.barrier()


def test_the_library_refuses_to_save_where_hosts_share_no_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    ranks = on_hosts(save_a_module, {1: [Mount(shared)]})
    ended = call_on_ranks(ranks, [str(shared)], folder=tmp_path / "run", ranks=2)
    assert ended.ok, ended.text
    assert all(f"{UNSEEN} (host host1, {shared}/.iter_0000001." in output for output in ended.outputs)
    assert all_files(shared) == {"lock": b""}


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
        verify_share(found, read_places(found), rank=0, world_size=1)
    assert ended.statuses == (1, 1), ended.text
    assert f"iteration 4 was not saved: Rank 1: {UNSEEN} (host host1, {checkpoints}/.iter_0000004." in ended.outputs[0]
    assert names_in(checkpoints, other) == [["iter_0000002", "latest_checkpointed_iteration.txt", "lock"], []]
    run_ok(run, [*BASE, topology], ranks=2)
    assert_ends_as(run, whole)
    assert all_files(checkpoint(run, 4)).keys() == all_files(checkpoint(whole, 4)).keys()


@pytest.mark.parametrize("begins_there", [False, True], ids=["a run that goes on", "a run that begins there"])
def test_hosts_with_other_checkpoints_at_one_path_do_not_train(tmp_path: Path, begins_there: bool) -> None:
    run, other, further = tmp_path / "run", tmp_path / "other", tmp_path / "next"
    run_ok(run, [*BASE, ZERO3], ranks=2)
    run_ok(other, [*BASE, ZERO3, "train.seed=2"], ranks=2)
    loaded, local = (checkpoint(folder, 4) for folder in (run, other))
    digests = [digest_of((path / MANIFEST).read_bytes()) for path in (loaded, local)]
    options = [f"checkpoint.load={run / 'checkpoints'}"] if begins_there else []
    options += [ZERO3, "train.train_iters=6", "checkpoint.override_scheduler=true"]
    before = all_files(run)
    ended = train_apart(further if begins_there else run, *options, mount=Mount(loaded, local))
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert f"(host host1, {loaded}" in output
        assert f"expected digest {digests[0]}, found digest {digests[1]}" in output
    assert "step     5/" not in ended.text
    assert all_files(run) == before
    assert not checkpoint(further, 6).exists()


def test_a_copy_of_the_checkpoint_on_a_host_s_own_disk_is_loaded(tmp_path: Path) -> None:
    whole, run, copy = tmp_path / "whole", tmp_path / "run", tmp_path / "copy"
    run_ok(whole, [*BASE, ZERO3], ranks=2)
    run_ok(run, [*BASE, ZERO3, "train.exit_interval=2"], ranks=2)
    shutil.copytree(checkpoint(run, 2), copy)
    ended = train_apart(run, ZERO3, mount=Mount(checkpoint(run, 2), copy))
    assert ended.ok, ended.text
    assert_ends_as(run, whole)


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
