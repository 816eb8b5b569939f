"""`reprise.prune` and `reprise.drop_optimizer`: what goes, what stays, and what stays valid whenever a process dies."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
from collections.abc import Callable
from errno import EIO
from functools import partial
from pathlib import Path

import pytest
import torch

import reprise
from reprise import copy, drop_optimizer, prune, verify
from reprise.errors import CheckpointError, ConfigError, LockError
from reprise.format.mirror_record import MIRROR, MirroredCheckpoint, MirrorRecord, MirrorRule
from reprise.format.names import FORMAT, MANIFEST, STATE
from reprise.loading.reader import open_checkpoint, read_places
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import WEIGHTS, CheckpointFolder
from reprise.storage.lock import FolderLock
from reprise.stores.store import CHILD_CLIENT
from tests.crash.killing import Killer
from tests.fakes import lone_contents, save_parts
from tests.harness import all_files
from tests.messages import refused
from tests.unit.reprise.management.test_listing import save

URL = "s3://bucket/run"


@pytest.mark.parametrize("numbers", [{"keep": 0}, {"keep": 1, "retain_interval": -1}])
def test_numbers_out_of_range_are_refused(tmp_path: Path, numbers: dict[str, int]) -> None:
    with refused(ConfigError, *(str(value) for value in numbers.values())):
        prune(save(tmp_path, 1), **numbers)  # type: ignore[arg-type]


MOMENTS = {"exp_avg.weight": torch.ones(2, 3)}
LIGHT, FULL = {"weight"}, {"weight", *MOMENTS}


def write(root: Path, iteration: int, moments: dict[str, torch.Tensor] = MOMENTS, **state: object) -> None:
    document = {STATE: {"format": FORMAT, "iteration": iteration, **state}}
    values = {"weight": torch.full((2, 3), float(iteration))}
    save_parts(root, iteration, lambda _: lone_contents(values, document, optimizer=moments))


def full_run(tmp_path: Path) -> Path:
    """Save three checkpoints as a run does, with the moments of their only weight; return their folder."""
    for iteration in (10, 20, 30):
        write(tmp_path / "run" / "checkpoints", iteration)
    return tmp_path / "run" / "checkpoints"


def names(path: Path) -> set[str]:
    return set(read_places(open_checkpoint(path, FILE_SYSTEM)))


def test_old_checkpoints_become_lighter_and_stay_valid(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    paths = [folder / f"iter_00000{n}" for n in (10, 20, 30)]
    before = all_files(paths[0])
    os.utime(paths[0] / MANIFEST, (1e9, 1e9))
    plan = drop_optimizer(folder, before=30, dry_run=True)
    assert names(paths[0]) == FULL
    assert drop_optimizer(tmp_path / "run", before=30) == plan
    size = len(before.pop(next(name for name in before if name.startswith("optimizer/"))))
    assert [(c.iteration, c.dropped_bytes, c.reason) for c in plan] == [(10, size, ""), (20, size, "")]
    assert [names(path) for path in paths] == [LIGHT, LIGHT, FULL]
    assert all_files(paths[0]) == before | {"optimizer_dropped": b""}
    light = open_checkpoint(paths[0], FILE_SYSTEM)
    assert (light.is_lightened, light.has_optimizer) == (True, False)
    for check in (0, None):
        summaries = reprise.list(folder, check=check)
        assert [summary.is_lightened for summary in summaries] == [True, True, False]
        assert summaries[0].written_at == 1e9  # when it was saved
    assert all(result.problem is None for result in verify(folder))
    assert sorted(folder.glob("*iter_*")) == paths
    assert drop_optimizer(folder, before=30) == ()


def test_only_a_marker_explains_missing_files_of_the_optimizer(tmp_path: Path) -> None:
    path = full_run(tmp_path) / "iter_0000010"
    (path / "optimizer_dropped").touch()
    assert names(path) == FULL  # killed before the rename: it is whole
    for check in (0, None):
        assert [summary.is_lightened for summary in reprise.list(path.parent, check=check)] == [False] * 3
    (path / "model.safetensors").rename(path / "aside")
    with refused(CheckpointError, "model.safetensors"):
        names(path)
    (path / "aside").rename(path / "model.safetensors")
    (path / "optimizer").rename(path / "aside")
    assert names(path) == LIGHT
    (path / "optimizer_dropped").unlink()
    with refused(CheckpointError, "optimizer"):
        names(path)


def test_a_lightened_checkpoint_is_copied_as_it_is(tmp_path: Path) -> None:
    """Into a folder, into a store, from there into another store, and back."""
    folder = full_run(tmp_path)
    drop_optimizer(folder, before=30)
    stores = [f"file://{tmp_path / name}" for name in ("store", "another")]
    for source, target in itertools.pairwise([folder, *stores, tmp_path / "copy"]):
        copy(source, target)
    copy(folder, tmp_path / "plain")
    for name, root in itertools.product(("iter_0000010", "iter_0000030"), ("store", "another", "copy", "plain")):
        assert all_files(tmp_path / root / name) == all_files(folder / name)


def test_a_store_keeps_the_newest_and_its_weights(tmp_path: Path) -> None:
    folder, url = full_run(tmp_path), f"file://{tmp_path}/store"
    write(folder / WEIGHTS, 5)
    copy(folder, url)
    for dry_run in (True, False):
        report = prune(url, keep=1, retain_interval=20, dry_run=dry_run)
        assert ([c.iteration for c in report.expired], report.retained) == ([10], (20, 30))
        assert all(checkpoint.total_bytes > 0 for checkpoint in report.expired)
        names = [f"{summary.path.parent.name}/{summary.path.name}" for summary in reprise.list(url)]
        assert names == ["store/iter_0000010"] * dry_run + [
            "store/iter_0000020", "store/iter_0000030", "weights/iter_0000005"
        ]  # fmt: skip


def test_a_failing_store_is_named_by_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, url: object) -> None:
        raise OSError(EIO, "the store is away", str(url))

    monkeypatch.setattr(type(CHILD_CLIENT), "head", fail, raising=False)
    monkeypatch.setattr(type(CHILD_CLIENT), "names", fail, raising=False)
    for dry_run in (True, False):
        with pytest.raises(OSError, match=f"the store is away: '{URL}'"):
            prune(URL, keep=1, dry_run=dry_run)


def test_a_checkpoint_that_release_0_2_lightened_loads(tmp_path: Path) -> None:
    """Its manifest was written anew, without the optimizer's files; its state has the digest of the one before."""
    folder = full_run(tmp_path)
    shutil.rmtree(folder / "iter_0000010")
    write(folder, 10, {}, optimizer_dropped={"manifest_xxh3_64": "0" * 16})
    assert open_checkpoint(folder / "iter_0000010", FILE_SYSTEM).is_lightened
    assert [summary.is_lightened for summary in reprise.list(folder)] == [True, False, False]


def mirrored(folder: Path, **entries: object) -> None:
    """Write the record of a mirror: what it has committed, or its interval and number to keep."""
    rule = MirrorRule(URL, **{name: value for name, value in entries.items() if name != "committed"})  # type: ignore[arg-type]
    (folder / MIRROR).write_bytes(MirrorRecord(rule, entries.get("committed", {})).to_bytes())  # type: ignore[arg-type]


def test_holds_and_mirrors_are_respected(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    (folder / MIRROR).write_bytes(b"{")
    with refused(CheckpointError, MIRROR):
        drop_optimizer(folder, before=30)
    (folder / "iter_0000010" / "hold").touch()
    digest = open_checkpoint(folder / "iter_0000020", FILE_SYSTEM).digest
    other, same = ({"iter_0000020": MirroredCheckpoint(found)} for found in ("0" * 16, digest))
    for rule, reason in (
        ({"committed": other}, f"not in {URL} yet"),
        ({"interval": 20}, f"not in {URL} yet"),
        ({"interval": 30}, ""),
        ({"keep": 1}, ""),
        ({"committed": same}, ""),
    ):
        mirrored(folder, **rule)
        results = drop_optimizer(folder, before=30, dry_run=rule != {"committed": same})
        assert [(c.iteration, c.reason) for c in results] == [(10, "held"), (20, reason)]
    assert names(folder / "iter_0000010") == FULL
    assert names(folder / "iter_0000020") == LIGHT


def test_a_store_with_the_full_checkpoint_needs_no_lighter_one(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    digest = open_checkpoint(folder / "iter_0000010", FILE_SYSTEM).digest
    for stored, changed, expected in ((digest, [10, 20], [20]), ("0" * 16, [10], [10])):
        mirrored(folder, committed={"iter_0000010": MirroredCheckpoint(stored)})
        drop_optimizer(folder, before=20)
        assert MirrorRule(URL).unmirrored(folder, [10, 20, 30], changed) == expected


def test_what_cannot_become_lighter_is_refused(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    with refused(CheckpointError, str(folder)):
        drop_optimizer(folder, before=31)
    with refused(ConfigError, URL):
        drop_optimizer(URL, before=30)
    assert names(folder / "iter_0000010") == FULL


def test_a_folder_that_takes_no_lock_is_named(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    (folder / "lock").unlink(missing_ok=True)
    (folder / "lock").mkdir()
    for call in CALLS:
        with refused(CheckpointError, str(folder)):
            call(folder)


CALLS = [partial(prune, keep=1), partial(drop_optimizer, before=30)]


@pytest.mark.parametrize("call", CALLS, ids=["prune", "drop"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_without_the_lock_nothing_changes(
    tmp_path: Path, call: Callable[[Path], object], is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = full_run(tmp_path)
    before = all_files(folder / "iter_0000010").keys()

    def lose(lock: FolderLock) -> None:
        raise LockError("Another job writes to this folder")

    if is_lost:
        monkeypatch.setattr(FolderLock, "check", lose)
    with contextlib.nullcontext() if is_lost else FolderLock(folder, "a run"), pytest.raises(LockError):
        call(folder)
    assert before <= all_files(folder / "iter_0000010").keys()


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.nightly), 5])
def test_a_kill_at_any_call_leaves_the_old_or_the_new(tmp_path: Path, step: int) -> None:
    """Drop the state of two checkpoints in processes that die before a call."""
    source, states = full_run(tmp_path / "all"), set()
    for at in itertools.count(0, step):
        folder = shutil.copytree(source.parents[1], tmp_path / f"{at}") / "run" / "checkpoints"
        gc.disable()  # in a fork of a process with threads, a collection may fail
        process = os.fork()
        if process == 0:
            Killer(folder, notes=folder.parent / "notes", at=at).install()
            drop_optimizer(folder, before=30)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        gc.enable()
        CheckpointFolder(folder, FILE_SYSTEM).sweep()
        states.add(frozenset(names(folder / "iter_0000010")))
        assert all(result.problem is None for result in verify(folder)), at
        assert len(reprise.list(folder)) == 3, at
        if status == 0:
            break
    assert at > 10
    assert states == {frozenset(LIGHT), frozenset(FULL)}


def test_a_hold_taken_during_the_rename_keeps_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = full_run(tmp_path)
    before, rename = all_files(folder / "iter_0000010"), Files.rename

    def hold_and_rename(files: Files, source: Path, target: Path) -> None:
        if source.parent.name == "iter_0000010":
            (source.parent / "hold").touch()
        rename(files, source, target)

    monkeypatch.setattr(Files, "rename", hold_and_rename)
    report = drop_optimizer(folder, before=30)
    assert [(c.iteration, c.reason) for c in report] == [(10, "held"), (20, "")]
    assert all_files(folder / "iter_0000010") == before | {"hold": b""}
    assert prune(folder, keep=1).retained == (10, 30)


def test_a_lightened_copy_is_no_copy_of_the_whole(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    copy(folder, tmp_path / "copies")
    drop_optimizer(tmp_path / "copies", before=20)
    with refused(CheckpointError, "iter_0000010"):
        copy(folder / "iter_0000010", tmp_path / "copies")
