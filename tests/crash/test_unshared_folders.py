"""Hosts that see different folders under one path: nothing is saved, loaded or trained from such a mixture."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import reprise
from reprise.errors import CheckpointError
from reprise.files import Files
from reprise.folder import MANIFEST, STATE
from reprise.format.manifest import digest_of
from reprise.reading import open_checkpoint, read_places, verify_share
from tests.crash.hosts import Mount, on_hosts, run_trainer
from tests.crash.moments import Gate, await_true, describe, train_with_gate
from tests.harness import TINY, all_files, call_on_ranks, curve, run_ok, started, tensor_files

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=4", "checkpoint.save_interval=2")
TENSOR_PARALLEL = "parallel.tensor_model_parallel_size=2"
UNSEEN = "This host does not see the checkpoint folder of rank 0"
# A run that cannot go on ends in 15 s; the rest is for a machine that is busy.
BOUND_S = 200.0


def show_folders(arguments: list[str]) -> None:
    """Print what a rank sees, and write a file into each folder."""
    for folder in map(Path, arguments):
        print(os.environ["LOCAL_RANK"], socket.gethostname(), sorted(path.name for path in folder.iterdir()))
        (folder / f"of{os.environ['RANK']}").touch()


def names_in(*folders: Path) -> list[list[str]]:
    return [sorted(path.name for path in folder.iterdir()) for folder in folders]


def test_a_simulated_host_sees_and_changes_its_own_mounts(tmp_path: Path) -> None:
    shared, other, empty = (tmp_path / name for name in ("shared", "other", "empty"))
    for folder in (shared, other, empty):
        folder.mkdir()
        (folder / f"in_{folder.name}").touch()
    ranks = on_hosts(show_folders, {1: [Mount(shared, other), Mount(empty)]})
    ended = call_on_ranks(ranks, [str(shared), str(empty)], folder=tmp_path / "run", ranks=2)
    assert ended.ok, ended.text
    assert ended.outputs[0].splitlines() == ["0 host0 ['in_shared']", "0 host0 ['in_empty']"]
    assert ended.outputs[1].splitlines() == ["0 host1 ['in_other']", "0 host1 []"]
    assert names_in(shared, other, empty) == [["in_shared", "of0"], ["in_other", "of1"], ["in_empty", "of0"]]


@pytest.mark.parametrize("has_folder", [False, True], ids=["no such folder", "such a folder"])
def test_hosts_without_a_shared_checkpoint_folder_do_not_start(tmp_path: Path, has_folder: bool) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    checkpoints = shared / "run/checkpoints"
    shared.mkdir()
    (other / "run/checkpoints" if has_folder else other).mkdir(parents=True)
    arguments = [f"run.dir={shared / 'run'}", *BASE]
    ranks = on_hosts(run_trainer, {1: [Mount(shared, other)]})
    with started(ranks, arguments, folder=tmp_path / "run", ranks=2) as running:
        running.join(BOUND_S)
    ended = running.ended()
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert f"{UNSEEN} (host host1, {checkpoints})" in output
        assert "found No such file or directory. Nothing was saved. Mount the same file system" in output
        assert "checkpoint.local.dir=FOLDER, on a disk of each host's own, and checkpoint.save=null" in output
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
    ended = call_on_ranks(
        on_hosts(save_a_module, {1: [Mount(shared)]}), [str(shared)], folder=tmp_path / "run", ranks=2
    )
    assert ended.ok, ended.text
    for output in ended.outputs:
        assert f"{UNSEEN} (host host1, {shared}/.iter_0000001." in output
    assert all_files(shared) == {"lock": b""}


def damaged(checkpoints: Path) -> list[str]:
    """Return the checkpoints whose bytes are not those of their digests."""
    found = []
    for path in sorted(checkpoints.glob("iter_*")):
        checkpoint = open_checkpoint(path, Files())
        try:
            verify_share(checkpoint, read_places(checkpoint), rank=0, world_size=1)
        except CheckpointError:
            found.append(path.name)
    return found


@pytest.mark.parametrize(
    ("topology", "is_empty"),
    [
        pytest.param("parallel.zero_stage=1", True, marks=pytest.mark.nightly),
        ("parallel.zero_stage=3", False),
        pytest.param(TENSOR_PARALLEL, False, marks=pytest.mark.nightly),
    ],
)
def test_a_host_that_loses_the_folder_fails_the_save_cleanly(tmp_path: Path, topology: str, is_empty: bool) -> None:
    whole, run, other = tmp_path / "whole", tmp_path / "run", tmp_path / "other"
    checkpoints = run / "checkpoints"
    other.mkdir()
    overrides = [*BASE, topology]
    run_ok(whole, overrides, ranks=2)
    gate = Gate(str(tmp_path / "gate"), "step", 4, (0, 1))
    Path(gate.folder).mkdir()
    arguments = [describe([gate]), f"run.dir={run}", *overrides]
    with started(on_hosts(train_with_gate, {}), arguments, folder=run, ranks=2) as running:
        gate.await_reached()
        await_true((checkpoints / "iter_0000002").exists)
        Mount(checkpoints, None if is_empty else other).make_in(running.processes[1].pid)
        gate.open()
        running.join(BOUND_S)
    ended = running.ended()
    assert damaged(checkpoints) == []
    assert ended.statuses == (1, 1), ended.text
    assert f"iteration 4 was not saved: Rank 1: {UNSEEN} (host host1, {checkpoints}/.iter_0000004." in ended.outputs[0]
    assert names_in(checkpoints, other) == [["iter_0000002", "latest_checkpointed_iteration.txt", "lock"], []]
    run_ok(run, overrides, ranks=2)
    assert curve(run) == curve(whole)
    for iteration in ("iter_0000002", "iter_0000004"):
        assert tensor_files(checkpoints / iteration) == tensor_files(whole / "checkpoints" / iteration)
        assert all_files(checkpoints / iteration).keys() == all_files(whole / "checkpoints" / iteration).keys()


@pytest.mark.parametrize(
    ("topology", "begins_there"),
    [("parallel.zero_stage=1", False), ("parallel.zero_stage=3", True)],
    ids=["a run that goes on", "a run that begins there"],
)
def test_hosts_with_other_checkpoints_at_one_path_do_not_train(
    tmp_path: Path, topology: str, begins_there: bool
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    overrides = [*BASE, topology]
    run_ok(run, overrides, ranks=2)
    run_ok(other, [*overrides, "train.seed=2"], ranks=2)
    loaded, local = (folder / "checkpoints/iter_0000004" for folder in (run, other))
    digests = [digest_of((path / MANIFEST).read_bytes()) for path in (loaded, local)]
    next_run = tmp_path / "next" if begins_there else run
    options = [f"checkpoint.load={run / 'checkpoints'}"] if begins_there else []
    before = all_files(run)
    ended = call_on_ranks(
        on_hosts(run_trainer, {1: [Mount(loaded, local)]}),
        [f"run.dir={next_run}", *overrides, "train.train_iters=6", "checkpoint.override_scheduler=true", *options],
        folder=tmp_path / "ended",
        ranks=2,
    )
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert f"This host reads another checkpoint than rank 0 under the same path (host host1, {loaded}" in output
        assert f"expected digest {digests[0]}, found digest {digests[1]}" in output
    assert "step     5/" not in ended.text
    assert all_files(run) == before
    assert not list(next_run.glob("checkpoints/iter_0000006"))


def test_a_copy_of_the_checkpoint_on_a_host_s_own_disk_is_loaded(tmp_path: Path) -> None:
    whole, run, copy = tmp_path / "whole", tmp_path / "run", tmp_path / "copy"
    overrides = [*BASE, "parallel.zero_stage=3"]
    run_ok(whole, overrides, ranks=2)
    run_ok(run, [*overrides, "train.exit_interval=2"], ranks=2)
    loaded = run / "checkpoints/iter_0000002"
    shutil.copytree(loaded, copy)
    ranks = on_hosts(run_trainer, {1: [Mount(loaded, copy)]})
    ended = call_on_ranks(ranks, [f"run.dir={run}", *overrides], folder=tmp_path / "ended", ranks=2)
    assert ended.ok, ended.text
    assert curve(run) == curve(whole)


def test_hosts_with_different_weights_at_one_path_do_not_train(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    overrides = [*BASE, "parallel.zero_stage=3"]
    run_ok(whole, overrides, ranks=2)
    ours, theirs = (model_folder(whole / f"checkpoints/iter_000000{n}", tmp_path / f"model{n}") for n in (2, 4))
    begins = [f"run.dir={run}", *overrides, f"checkpoint.load={ours}", "checkpoint.finetune=true"]
    ranks = on_hosts(run_trainer, {1: [Mount(ours, theirs)]})
    ended = call_on_ranks(ranks, begins, folder=tmp_path / "ended", ranks=2)
    assert ended.statuses == (1, 1), ended.text
    assert all(f"sees other weights than rank 0 under the same path (host host1, {ours})" in o for o in ended.outputs)
    assert "step     1/" not in ended.text
    copy = model_folder(whole / "checkpoints/iter_0000002", tmp_path / "copy")
    ranks = on_hosts(run_trainer, {1: [Mount(ours, copy)]})
    ended = call_on_ranks(ranks, begins, folder=tmp_path / "ended again", ranks=2)
    assert ended.ok, ended.text


def model_folder(checkpoint: Path, folder: Path) -> Path:
    """Copy what transformers reads of a checkpoint, and return the folder."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(MANIFEST, STATE, "optimizer"))
    return folder
