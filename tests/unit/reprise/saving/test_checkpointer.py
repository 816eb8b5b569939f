"""A run's checkpoints over many saves: what stays, what is swept, and what a failing disk may do."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reprise.errors import CheckpointError, LockError
from reprise.format.names import FORMAT, STATE
from reprise.loading.choose import LoadSource
from reprise.loading.restorer import Restorer
from reprise.ranks.channel import single_rank_channel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy, SaveReport
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.tensors.live import Contents
from tests.fakes import FailingFiles, lone_contents, run_ranks


def contents(iteration: int, *, with_optimizer: bool = False) -> Contents:
    values = {"w": torch.full((50, 40), float(iteration))}
    moments = {"exp_avg.w": torch.full((50, 40), -float(iteration))} if with_optimizer else None
    return lone_contents(values, {STATE: {"format": FORMAT, "iteration": iteration}}, optimizer=moments)


@contextlib.contextmanager
def started(policy: SavePolicy, files: Files = FILE_SYSTEM, nonce: str = "n") -> Iterator[Checkpointer]:
    with contextlib.closing(Checkpointer(policy, single_rank_channel(), nonce=nonce, files=files)) as checkpointer:
        checkpointer.start()
        yield checkpointer


def saved(checkpointer: Checkpointer, iteration: int) -> SaveReport:
    report = checkpointer.save(iteration, contents(iteration))
    assert report is not None
    assert report.error is None, str(report.error)
    assert report.blocked_s >= report.seconds > 0  # training stands still for an inline save
    return report


def folders_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def load(path: Path) -> float:
    """Return the one value that all of `w` has."""
    target = contents(0)
    restorer = Restorer(single_rank_channel(), nonce="n")
    restorer.restore(LoadSource(path), check=lambda _: None, live=lambda _: target.live)
    (value,) = set(target.live[0].local.flatten().tolist())
    return float(value)


def restore(checkpointer: Checkpointer, source: LoadSource, *, with_optimizer: bool = False) -> int:
    """Restore as the trainer does: the checkpointer is to know of it. Return the iteration."""
    live = contents(0, with_optimizer=with_optimizer).live
    restored = Restorer(single_rank_channel(), nonce="n").restore(source, check=lambda _: None, live=lambda _: live)
    checkpointer.note_loaded(restored)
    return restored.checkpoint.iteration


def test_retention_counts_past_seven_digits_and_a_loaded_one_too(tmp_path: Path) -> None:
    with started(SavePolicy(tmp_path)) as first:
        saved(first, 9_999_998)
    with started(SavePolicy(tmp_path, retention=Retention(2))) as second:
        restore(second, LoadSource(tmp_path))
        for iteration in (9_999_999, 10_000_000, 10_000_001):
            saved(second, iteration)
    assert folders_in(tmp_path) == ["iter_10000000", "iter_10000001"]


@pytest.mark.parametrize(
    ("named", "checks", "left"),
    [
        (None, {}, ["iter_0000001", "iter_0000003"]),
        (2, {}, ["iter_0000002", "iter_0000003.superseded-1"]),
        (None, None, ["iter_0000001", "iter_0000002", "iter_0000003"]),
        (None, {"with_optimizer": False}, ["iter_0000001", "iter_0000002", "iter_0000003"]),
    ],
    ids=["newest", "older", "not loaded", "not whole"],
)
def test_a_start_deletes_once_all_of_the_newest_is_checked(
    tmp_path: Path, named: int | None, checks: dict[str, bool] | None, left: list[str]
) -> None:
    """It deletes what retention does not keep, but nothing held or abandoned."""
    with started(SavePolicy(tmp_path)) as checkpointer:
        for iteration in (1, 2, 3):
            checkpointer.save(iteration, contents(iteration, with_optimizer=True))
    if named is None:
        (tmp_path / "iter_0000001" / "hold").touch()
    with started(SavePolicy(tmp_path, retention=Retention(1))) as checkpointer:
        iteration = 3
        if checks is not None:
            iteration = restore(checkpointer, LoadSource(tmp_path, named), **{"with_optimizer": True, **checks})
        checkpointer.rewind(iteration)
    assert folders_in(tmp_path) == left


def test_a_start_keeps_a_damaged_newest_as_superseded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with started(SavePolicy(tmp_path)) as checkpointer:
        for iteration in (1, 2, 3, 4):
            saved(checkpointer, iteration)
    (tmp_path / "iter_0000004" / STATE).unlink()
    with started(SavePolicy(tmp_path, retention=Retention(2))) as checkpointer:
        checkpointer.rewind(restore(checkpointer, LoadSource(tmp_path)))
    assert folders_in(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004.superseded-1"]
    assert "is kept as iter_0000004.superseded-1" in caplog.text
    assert "deleted iteration 1," in caplog.text


def test_a_rewind_renames_newer_checkpoints_and_saves_them_anew(tmp_path: Path) -> None:
    with started(SavePolicy(tmp_path)) as checkpointer:
        for iteration in (1, 2, 3):
            saved(checkpointer, iteration)
        checkpointer.rewind(1)
        assert folders_in(tmp_path) == ["iter_0000001", "iter_0000002.superseded-1", "iter_0000003.superseded-1"]
        saved(checkpointer, 3)  # the newest again
    assert load(tmp_path) == 3.0


def test_a_second_run_on_a_folder_is_refused_on_every_rank(tmp_path: Path) -> None:
    with started(SavePolicy(tmp_path)):
        (tmp_path / ".iter_0000001.n-1.partial").mkdir()
        outcomes = run_ranks(2, lambda channel: Checkpointer(SavePolicy(tmp_path), channel, nonce="other").start())
    assert [type(outcome) for outcome in outcomes] == [LockError, LockError]
    assert all(f"pid {os.getpid()}" in str(outcome) for outcome in outcomes)
    assert (tmp_path / ".iter_0000001.n-1.partial").exists()
    with started(SavePolicy(tmp_path)):
        assert not (tmp_path / ".iter_0000001.n-1.partial").exists()


def failure(checkpointer: Checkpointer, iteration: int) -> str:
    """Return why a save fails."""
    report = checkpointer.save(iteration, contents(iteration))
    assert report is not None
    assert isinstance(report.error, CheckpointError)
    return str(report.error)


def test_logs_are_durable_before_the_rename_or_nothing_is(tmp_path: Path) -> None:
    threads = list[str]()

    def sync() -> None:
        assert not (tmp_path / "iter_0000005").exists()
        threads.append(threading.current_thread().name)

    def fail() -> None:
        raise OSError(errno.EIO, "no disk")

    def note() -> None:
        assert (tmp_path / "iter_0000005").exists()
        threads.append(threading.current_thread().name)

    with started(SavePolicy(tmp_path, async_save=True)) as checkpointer:
        checkpointer.save(5, replace(contents(5), syncs=(sync, sync), notes=(note,)))
        checkpointer.save(6, replace(contents(6), syncs=(fail,), notes=(note,)))
        checkpointer.wait()
        assert ["no disk" in str(report.error) for report in checkpointer.reports()] == [False, True]
    assert [name.startswith("checkpoint") for name in threads] == [True, True, True]
    assert folders_in(tmp_path) == ["iter_0000005"]


def test_an_iteration_of_this_process_is_not_saved_again(tmp_path: Path) -> None:
    with started(SavePolicy(tmp_path)) as first:
        saved(first, 5)
        assert first.save(5, contents(5)) is None
    with started(SavePolicy(tmp_path)) as second:
        restore(second, LoadSource(tmp_path))
        assert second.save(5, contents(5)) is None
        report = second.save(5, contents(5, with_optimizer=True))
        assert report is not None
        assert report.error is None
        assert second.save(5, contents(5)) is None
    assert folders_in(tmp_path) == ["iter_0000005", "iter_0000005.superseded-1"]


def test_new_memory_under_the_same_names_is_saved(tmp_path: Path) -> None:
    first = contents(1)
    with started(SavePolicy(tmp_path)) as checkpointer:
        for iteration, given in ((1, first), (2, replace(contents(2), specs=first.specs))):
            report = checkpointer.save(iteration, given)
            assert report is not None
            assert report.error is None
    assert load(tmp_path / "iter_0000002") == 2.0


@pytest.mark.parametrize(
    ("outdated", "with_optimizer", "is_superseded"),
    [(None, False, True), ("own", False, False), ("elsewhere", False, True), ("own", True, True)],
)
def test_an_iteration_of_another_process_is_superseded(
    tmp_path: Path, outdated: str | None, with_optimizer: bool, is_superseded: bool
) -> None:
    """One that is outdated gives way to the next save, unless that has less, or another folder's was loaded."""
    for name in ("own", "elsewhere"):
        with started(SavePolicy(tmp_path / name)) as first:
            first.save(5, contents(5, with_optimizer=with_optimizer))
    with started(SavePolicy(tmp_path / "own"), nonce="m") as again:
        if outdated is not None:
            assert restore(again, LoadSource(tmp_path / outdated), with_optimizer=with_optimizer) == 5
            again.mark_outdated(5)
        saved(again, 5)
    assert folders_in(tmp_path / "own") == ["iter_0000005", "iter_0000005.superseded-1"][: 1 + is_superseded]


def test_loading_a_superseded_folder_is_not_its_iteration(tmp_path: Path) -> None:
    with started(SavePolicy(tmp_path)) as first:
        path = saved(first, 5).path.rename(tmp_path / "iter_0000005.superseded-1")
    with started(SavePolicy(tmp_path)) as second:
        restore(second, LoadSource(path))
        saved(second, 5)


KINDS = [
    "free_bytes", "make_folder", "open_for_writing", "reserve", "write", "sync", "close", "write_new", "sync_folder",
    "rename",
]  # fmt: skip
LATER = [("write", 1), ("sync", 2), ("write_new", 1), ("rename", 1), ("sync_folder", 2)]
MORE = [(kind, after) for kind, _ in LATER for after in (1, 2, 3) if (kind, after) not in LATER]


@pytest.mark.parametrize(
    ("kind", "after"),
    [*((kind, 0) for kind in KINDS), *LATER, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_a_failure_leaves_the_committed_and_a_whole_save_or_none(
    tmp_path: Path, kind: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    code = (errno.ENOSPC, errno.EIO)[len(kind) % 2]
    files = FailingFiles(kind, code, after=after)
    files.is_armed = False
    with started(SavePolicy(tmp_path), files) as checkpointer:
        saved(checkpointer, 5)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        files.is_armed = True
        report = checkpointer.save(10, contents(10))
        files.is_armed = False
        assert report is not None
        if not after:
            assert isinstance(report.error, CheckpointError)
            assert f"errno {code}" in str(report.error)
            lines = [record for record in caplog.records if "iteration 10 was not saved" in record.getMessage()]
            assert [line.levelno for line in lines] == [logging.ERROR]
        if folders_in(tmp_path) == ["iter_0000005"]:
            assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        else:
            assert after
            assert folders_in(tmp_path) == ["iter_0000005", "iter_0000010"]
            assert load(tmp_path / "iter_0000010") == 10.0
        saved(checkpointer, 15)
    assert load(tmp_path) == 15.0


def test_a_start_sweeps_dead_attempts_and_a_save_does_not(tmp_path: Path) -> None:
    class Broken(FailingFiles):
        def remove(self, path: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

    with started(SavePolicy(tmp_path), Broken("sync")) as checkpointer:
        failure(checkpointer, 10)
    stale, similar = ".iter_0000001.dead-1.partial", ".iter_0000001.dead-1.partially"
    for name in (stale, similar):
        (tmp_path / name / "optimizer").mkdir(parents=True)
    assert folders_in(tmp_path) == [stale, similar, ".iter_0000010.n-1.partial"]
    with started(SavePolicy(tmp_path)) as checkpointer:
        assert folders_in(tmp_path) == [similar]
        (tmp_path / stale).mkdir()
        saved(checkpointer, 5)
    assert folders_in(tmp_path) == [stale, similar, "iter_0000005"]


def test_an_undeletable_checkpoint_does_not_fail_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(SavePolicy(tmp_path, retention=Retention(1)), FailingFiles("remove")) as checkpointer:
        saved(checkpointer, 1)
        saved(checkpointer, 2)
    assert "iteration 1 could not be deleted" in caplog.text
    assert load(tmp_path) == 2.0


class Room(Files):
    """A file system with so much room, of which other ranks may have taken a part for their pieces already."""

    def __init__(self, free_bytes: int, taken_bytes: int = 0) -> None:
        self.free_now, self._taken_bytes = free_bytes, taken_bytes

    def free_bytes(self, path: Path) -> int | None:
        return self.free_now

    def allocated_bytes(self, path: Path) -> int:
        return super().allocated_bytes(path) + self._taken_bytes * path.name.endswith(".partial")


def missing_bytes(text: str) -> tuple[int, int]:
    """Return how much room a save that was refused asks for, and how much of it is to be made."""
    figures = re.search(r"expected (\d+) B free, found \d+ B free\. Free (\d+) B more", text)
    assert figures is not None, text
    return int(figures[1]), int(figures[2])


def test_a_save_asks_for_as_much_room_as_it_takes(tmp_path: Path) -> None:
    with started(SavePolicy(tmp_path)) as checkpointer:
        taken = Files().allocated_bytes(saved(checkpointer, 5).path)
    with started(SavePolicy(tmp_path), Room(0)) as checkpointer:
        needed, _ = missing_bytes(failure(checkpointer, 10))
    assert 0 < taken <= needed <= taken + (1 << 20)
    assert Files().allocated_bytes(tmp_path / "nothing") == 0
    for free, by_peers, is_saved in ((needed - 1, 0, False), (needed - 5001, 5000, False), (needed - 5000, 5000, True)):
        with started(SavePolicy(tmp_path), Room(free, by_peers)) as checkpointer:
            report = checkpointer.save(10, contents(10))
        assert report is not None
        assert (report.error is None) == is_saved


def test_a_file_system_that_does_not_tell_its_size_is_saved_to(tmp_path: Path) -> None:
    class Silent(Files):
        def free_bytes(self, path: Path) -> int | None:
            return super().free_bytes(Path("/proc"))  # 0 of 0 blocks, as some network file systems report

    with started(SavePolicy(tmp_path), Silent()) as checkpointer:
        saved(checkpointer, 10)
