"""`reprise.drop_optimizer`: old checkpoints become lighter and stay valid, whenever the process dies."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

import reprise
from reprise.errors import CheckpointError, ConfigError, LockError
from reprise.files import FILE_SYSTEM
from reprise.folder import FORMAT, MANIFEST, STATE, CheckpointFolder, FolderLock
from reprise.format.mirror_record import MIRROR, MirroredCheckpoint, MirrorRecord, MirrorRule
from reprise.layout import DEFAULT_FILE_BYTES, StoredDtype, TensorKind, TensorSpec, build_layout
from reprise.reading import open_checkpoint
from reprise.savers import write_checkpoint
from tests.crash.killing import Killer
from trainer.interop.tensor_files import write_tensor_files

SPECS = [
    TensorSpec(kind, name, (2, 3), StoredDtype.F32, (2, 3))
    for kind, name in ((TensorKind.MODEL, "weight"), (TensorKind.OPTIMIZER, "exp_avg.weight"))
]


def full_run(tmp_path: Path) -> Path:
    """Save three checkpoints as a run does, with the moments of their only weight; return their folder."""
    folder, layout = (
        CheckpointFolder(tmp_path / "run" / "checkpoints", FILE_SYSTEM),
        build_layout(SPECS, file_bytes=DEFAULT_FILE_BYTES),
    )
    for iteration in (10, 20, 30):
        values = torch.full((2, 3), float(iteration))
        write_checkpoint(
            folder,
            iteration,
            layout,
            lambda target, values=values: write_tensor_files(target, FILE_SYSTEM, layout, lambda _: values),
            documents={STATE: {"format": FORMAT, "iteration": iteration}},
            aliases={},
        )
    return folder.root


def killed(folder: Path, at: int | None) -> int:
    """Drop the state of two checkpoints in a process that dies before a call; return the number of calls, without."""
    calls = folder.parent / "calls"
    gc.disable()  # in a fork of a process with threads, a collection may fail
    process = os.fork()
    if process == 0:
        killer = Killer(folder, notes=folder.parent / "notes", at=at)
        killer.install()
        reprise.drop_optimizer(folder, before=30)
        calls.write_text(str(len(killer.calls)))
        os._exit(0)
    os.waitpid(process, 0)
    gc.enable()
    return int(calls.read_text()) if at is None else 0


def names(path: Path) -> set[str]:
    return set(open_checkpoint(path, FILE_SYSTEM).manifest.tensors)


def test_old_checkpoints_become_lighter_and_stay_valid(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    before = (folder / "iter_0000010" / "model.safetensors").read_bytes()
    os.utime(folder / "iter_0000010" / MANIFEST, (1e9, 1e9))
    plan = reprise.drop_optimizer(folder, before=30, dry_run=True)
    assert names(folder / "iter_0000010") == {"weight", "exp_avg.weight"}
    assert reprise.drop_optimizer(tmp_path / "run", before=30) == plan
    assert [(c.iteration, c.dropped_bytes, c.reason) for c in plan] == [(10, 24, ""), (20, 24, "")]
    assert names(folder / "iter_0000010") == names(folder / "iter_0000020") == {"weight"}
    assert names(folder / "iter_0000030") == {"weight", "exp_avg.weight"}
    assert (folder / "iter_0000010" / "model.safetensors").read_bytes() == before
    assert not (folder / "iter_0000010" / "optimizer").exists()
    light = open_checkpoint(folder / "iter_0000010", FILE_SYSTEM)
    assert not light.has_optimizer
    assert len(light.state["optimizer_dropped"]["manifest_xxh3_64"]) == 16
    assert reprise.list(folder)[0].written_at == 1e9  # when it was saved
    assert all(result.problem is None for result in reprise.verify(folder))
    assert {path.name for path in folder.glob("*iter_*")} == {"iter_0000010", "iter_0000020", "iter_0000030"}
    assert reprise.drop_optimizer(folder, before=30) == ()


def test_holds_and_mirrors_are_respected(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    (folder / "iter_0000010" / "hold").touch()
    digest = open_checkpoint(folder / "iter_0000020", FILE_SYSTEM).digest
    for entry, reason in (
        (MirroredCheckpoint("0" * 16), "not in s3://bucket/run yet"),
        (MirroredCheckpoint(digest), ""),
    ):
        (folder / MIRROR).write_bytes(MirrorRecord("s3://bucket/run", {"iter_0000020": entry}).to_bytes())
        results = reprise.drop_optimizer(folder, before=30)
        assert [(c.iteration, c.reason) for c in results] == [(10, "held"), (20, reason)]
    assert names(folder / "iter_0000010") == {"weight", "exp_avg.weight"}
    assert names(folder / "iter_0000020") == {"weight"}


@pytest.mark.parametrize(
    ("interval", "keep", "reasons"), [(20, 0, ["", "not in s3://bucket/run yet"]), (0, 1, ["", ""])]
)
def test_what_a_mirror_never_takes_is_not_waited_for(
    tmp_path: Path, interval: int, keep: int, reasons: list[str]
) -> None:
    folder = full_run(tmp_path)
    record = MirrorRecord("s3://bucket/run", interval=interval, keep=keep)
    (folder / MIRROR).write_bytes(record.to_bytes())
    assert [checkpoint.reason for checkpoint in reprise.drop_optimizer(folder, before=30)] == reasons


def test_a_damaged_record_of_a_mirror_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    (folder / MIRROR).write_bytes(MirrorRecord("s3://bucket/run").to_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"damaged \(.*mirror\.json\)\. Start the mirror"):
        reprise.drop_optimizer(folder, before=30)


def test_a_store_with_the_full_checkpoint_needs_no_lighter_one(tmp_path: Path) -> None:
    folder, url = full_run(tmp_path), "s3://bucket/run"
    digest = open_checkpoint(folder / "iter_0000010", FILE_SYSTEM).digest
    (folder / MIRROR).write_bytes(MirrorRecord(url, {"iter_0000010": MirroredCheckpoint(digest)}).to_bytes())
    reprise.drop_optimizer(folder, before=20)
    assert MirrorRule(url).unmirrored(folder, [10, 20, 30], [10, 20]) == [20]
    (folder / MIRROR).write_bytes(MirrorRecord(url, {"iter_0000010": MirroredCheckpoint("0" * 16)}).to_bytes())
    assert MirrorRule(url).unmirrored(folder, [10, 20, 30], [10]) == [10]


def test_what_cannot_become_lighter_is_refused(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    with pytest.raises(CheckpointError, match="None of the checkpoints that would stay has an optimizer's state"):
        reprise.drop_optimizer(folder, before=31)
    with pytest.raises(ConfigError, match="dropped in folders, not in a store"):
        reprise.drop_optimizer("s3://bucket/run", before=30)
    lock = FolderLock(folder, "a run")
    lock.acquire()
    with pytest.raises(LockError):
        reprise.drop_optimizer(folder, before=30)
    lock.release()
    assert names(folder / "iter_0000010") == {"weight", "exp_avg.weight"}


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 29])
def test_a_kill_at_any_call_leaves_the_old_or_the_new(tmp_path: Path, step: int) -> None:
    calls = killed(full_run(tmp_path / "all"), None)
    assert calls > 20
    lighter = 0
    for at in range(0, calls, step):
        folder = full_run(tmp_path / f"{at}")
        killed(folder, at)
        CheckpointFolder(folder, FILE_SYSTEM).sweep()
        assert names(folder / "iter_0000010") in ({"weight"}, {"weight", "exp_avg.weight"}), at
        assert all(result.problem is None for result in reprise.verify(folder)), at
        assert len(reprise.list(folder)) == 3, at
        lighter += names(folder / "iter_0000010") == {"weight"}
    assert step > 1 or 0 < lighter < calls
