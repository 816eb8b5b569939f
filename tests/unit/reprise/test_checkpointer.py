"""A run's checkpoints over many saves: what stays, what is swept, and what a failing disk may do."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reprise.checkpointer import Checkpointer
from reprise.commit.channel import StoreChannel, single_rank_channel
from reprise.errors import CheckpointError, LockError
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec
from reprise.format.names import FORMAT, STATE
from reprise.loading.choose import LoadSource
from reprise.loading.reader import open_checkpoint
from reprise.loading.restorer import Restorer
from reprise.policy import Retention, SavePolicy, SaveReport
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import TRACKER, FolderTerms
from reprise.tensors.live import Contents
from tests.fakes import Axis as Cut
from tests.fakes import FailingFiles, Sharding, StuckFiles, all_ranks, lone_contents, run_ranks

KINDS = [
    "free_bytes", "make_folder", "open_for_writing", "reserve", "write", "sync", "close", "write_new", "sync_folder",
    "rename",
]  # fmt: skip


def contents(iteration: int, *, with_optimizer: bool = False) -> Contents:
    values = {"w": torch.full((50, 40), float(iteration))}
    moments = {"exp_avg.w": torch.full((50, 40), -float(iteration))} if with_optimizer else None
    return lone_contents(values, {STATE: {"format": FORMAT, "iteration": iteration}}, optimizer=moments)


def started(policy: SavePolicy, files: Files = FILE_SYSTEM, nonce: str = "n") -> Checkpointer:
    checkpointer = Checkpointer(policy, single_rank_channel(), nonce=nonce, files=files)
    checkpointer.start()
    return checkpointer


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


def restore(
    checkpointer: Checkpointer, source: LoadSource, *, verify: bool = True, with_optimizer: bool = False
) -> int:
    """Restore as the trainer does: the checkpointer is to know of it. Return the iteration."""
    live = contents(0, with_optimizer=with_optimizer).live
    restored = Restorer(single_rank_channel(), nonce="n").restore(
        source, check=lambda _: None, live=lambda _: live, verify=verify
    )
    checkpointer.loaded(restored)
    return restored.checkpoint.iteration


def test_the_tracker_names_the_newest_and_nothing_else_is_left(tmp_path: Path) -> None:
    checkpointer = started(SavePolicy(tmp_path))
    for iteration in (5, 10):
        saved(checkpointer, iteration)
        assert (tmp_path / TRACKER).read_text() == f"{iteration}\n"
    checkpointer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000005", "iter_0000010", TRACKER, "lock"}
    assert load(tmp_path) == 10.0


def test_a_log_is_durable_before_the_rename(tmp_path: Path) -> None:
    checkpointer, threads = started(SavePolicy(tmp_path, async_save=True)), list[str]()

    def sync() -> None:
        assert not (tmp_path / "iter_0000005").exists()
        threads.append(threading.current_thread().name)

    checkpointer.save(5, replace(contents(5), syncs=(sync, sync)))
    checkpointer.close()
    assert (tmp_path / "iter_0000005").is_dir()
    assert len(threads) == 2
    assert all(name.startswith("checkpoint") for name in threads)


def test_a_checkpoint_whose_log_cannot_be_synced_is_none(tmp_path: Path) -> None:
    def sync() -> None:
        raise OSError(errno.EIO, "no disk")

    checkpointer = started(SavePolicy(tmp_path))
    report = checkpointer.save(5, replace(contents(5), syncs=(sync,)))
    assert report is not None
    assert "no disk" in str(report.error)
    assert not (tmp_path / "iter_0000005").exists()


def test_an_iteration_saved_by_this_process_is_not_saved_again(tmp_path: Path) -> None:
    checkpointer = started(SavePolicy(tmp_path))
    saved(checkpointer, 5)
    assert checkpointer.save(5, contents(5)) is None
    report = checkpointer.save(5, contents(5, with_optimizer=True))
    assert report is not None
    assert report.error is None
    assert folders_in(tmp_path) == ["iter_0000005", "iter_0000005.superseded-1"]
    assert checkpointer.save(5, contents(5)) is None
    checkpointer.close()


def test_an_iteration_loaded_by_this_process_is_not_saved_again(tmp_path: Path) -> None:
    first = started(SavePolicy(tmp_path))
    saved(first, 5)
    first.close()
    second = started(SavePolicy(tmp_path))
    restore(second, LoadSource(tmp_path))
    assert second.save(5, contents(5)) is None
    second.close()


def test_an_iteration_of_another_process_is_superseded(tmp_path: Path) -> None:
    for _ in range(3):
        checkpointer = started(SavePolicy(tmp_path))
        saved(checkpointer, 5)
        checkpointer.close()
    assert folders_in(tmp_path) == ["iter_0000005", "iter_0000005.superseded-1", "iter_0000005.superseded-2"]


def test_an_outdated_checkpoint_gives_way_to_its_next_save(tmp_path: Path) -> None:
    first = started(SavePolicy(tmp_path))
    saved(first, 5)
    first.close()
    again = started(SavePolicy(tmp_path), nonce="m")
    assert restore(again, LoadSource(tmp_path)) == 5
    again.outdated(5)
    saved(again, 5)
    again.close()
    assert folders_in(tmp_path) == ["iter_0000005"]


def test_an_outdated_checkpoint_of_elsewhere_costs_no_own_one(tmp_path: Path) -> None:
    for name in ("own", "elsewhere"):
        first = started(SavePolicy(tmp_path / name))
        saved(first, 5)
        first.close()
    again = started(SavePolicy(tmp_path / "own"), nonce="m")
    assert restore(again, LoadSource(tmp_path / "elsewhere")) == 5
    again.outdated(5)
    saved(again, 5)
    again.close()
    assert folders_in(tmp_path / "own") == ["iter_0000005", "iter_0000005.superseded-1"]


def test_an_outdated_checkpoint_outlives_one_without_moments(tmp_path: Path) -> None:
    first = started(SavePolicy(tmp_path))
    first.save(5, contents(5, with_optimizer=True))
    first.close()
    again = started(SavePolicy(tmp_path), nonce="m")
    assert restore(again, LoadSource(tmp_path), with_optimizer=True) == 5
    again.outdated(5)
    saved(again, 5)
    again.close()
    assert folders_in(tmp_path) == ["iter_0000005", "iter_0000005.superseded-1"]


def test_loading_a_superseded_folder_is_not_its_iteration(tmp_path: Path) -> None:
    first = started(SavePolicy(tmp_path))
    report = saved(first, 5)
    first.close()
    report.path.rename(tmp_path / "iter_0000005.superseded-1")
    second = started(SavePolicy(tmp_path))
    source = LoadSource(tmp_path / "iter_0000005.superseded-1")
    restore(second, source)
    saved(second, 5)
    second.close()


def test_the_start_sweeps_dead_attempts_and_a_save_does_not(tmp_path: Path) -> None:
    stale, similar = ".iter_0000001.dead-1.partial", ".iter_0000001.dead-1.partially"
    (tmp_path / stale / "optimizer").mkdir(parents=True)
    (tmp_path / similar).mkdir()
    checkpointer = started(SavePolicy(tmp_path))
    assert folders_in(tmp_path) == [similar]
    (tmp_path / stale).mkdir()
    saved(checkpointer, 5)
    assert folders_in(tmp_path) == [stale, similar, "iter_0000005"]
    checkpointer.close()


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(2), [9, 10]),
        (Retention(2, save_retain_interval=4), [4, 8, 9, 10]),
        (Retention(0), list(range(1, 11))),
    ],
)
def test_retention_leaves_the_right_folders(tmp_path: Path, retention: Retention, left: list[int]) -> None:
    checkpointer = started(SavePolicy(tmp_path, retention=retention))
    for iteration in range(1, 11):
        saved(checkpointer, iteration)
    checkpointer.close()
    assert folders_in(tmp_path) == [f"iter_{iteration:07d}" for iteration in left]


def test_retention_counts_past_seven_digits_and_a_loaded_one_too(tmp_path: Path) -> None:
    first = started(SavePolicy(tmp_path))
    saved(first, 9_999_998)
    first.close()
    second = started(SavePolicy(tmp_path, retention=Retention(2)))
    restore(second, LoadSource(tmp_path))
    for iteration in (9_999_999, 10_000_000, 10_000_001):
        saved(second, iteration)
    second.close()
    assert folders_in(tmp_path) == ["iter_10000000", "iter_10000001"]


def resumed(root: Path, retention: Retention, iteration: int | None = None) -> list[str]:
    """Start, load and rewind as the trainer does; return the folders that are left."""
    checkpointer = started(SavePolicy(root, retention=retention))
    source = LoadSource(root, iteration)
    checkpointer.rewind(restore(checkpointer, source))
    checkpointer.close()
    return folders_in(root)


@pytest.fixture
def five(tmp_path: Path) -> Path:
    """Return a folder with iterations 1 to 5."""
    checkpointer = started(SavePolicy(tmp_path))
    for iteration in range(1, 6):
        saved(checkpointer, iteration)
    checkpointer.close()
    return tmp_path


def test_a_start_deletes_what_retention_does_not_keep(five: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (five / "iter_0000002" / "hold").touch()
    assert resumed(five, Retention(2)) == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert "deleted iteration 1, which max_checkpoint_keep=2 does not keep" in caplog.text
    assert load(five) == 5.0


def test_a_start_deletes_no_abandoned_and_no_loaded_checkpoint(five: Path) -> None:
    kept = ["iter_0000003", "iter_0000004.superseded-1", "iter_0000005.superseded-1"]
    assert resumed(five, Retention(1), 3) == kept


def test_a_start_deletes_nothing_before_it_has_loaded_the_newest(five: Path) -> None:
    before = folders_in(five)
    checkpointer = started(SavePolicy(five, retention=Retention(1)))
    checkpointer.rewind(5)
    checkpointer.close()
    assert folders_in(five) == before
    (five / "iter_0000005" / STATE).unlink()
    assert resumed(five, Retention(2)) == ["iter_0000003", "iter_0000004", "iter_0000005.superseded-1"]


@pytest.mark.parametrize(("verify", "with_optimizer"), [(False, True), (True, False), (True, True)])
def test_a_start_deletes_nothing_for_an_unchecked_newest(tmp_path: Path, verify: bool, with_optimizer: bool) -> None:
    for iteration in (1, 2):
        checkpointer = started(SavePolicy(tmp_path))
        checkpointer.save(iteration, contents(iteration, with_optimizer=True))
        checkpointer.close()
    checkpointer = started(SavePolicy(tmp_path, retention=Retention(1)))
    restore(checkpointer, LoadSource(tmp_path), verify=verify, with_optimizer=with_optimizer)
    checkpointer.rewind(2)
    checkpointer.close()
    is_checked = verify and with_optimizer
    assert folders_in(tmp_path) == (["iter_0000002"] if is_checked else ["iter_0000001", "iter_0000002"])


def test_a_rewind_renames_newer_checkpoints_and_saves_them_anew(tmp_path: Path) -> None:
    checkpointer = started(SavePolicy(tmp_path))
    for iteration in (1, 2, 3):
        saved(checkpointer, iteration)
    checkpointer.rewind(1)
    assert folders_in(tmp_path) == ["iter_0000001", "iter_0000002.superseded-1", "iter_0000003.superseded-1"]
    saved(checkpointer, 2)
    checkpointer.close()
    assert load(tmp_path) == 2.0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_save_is_reported_and_touches_nothing_committed(
    tmp_path: Path, kind: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = FailingFiles(kind, code)
    files.is_armed = False
    checkpointer = started(SavePolicy(tmp_path), files)
    saved(checkpointer, 5)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    files.is_armed = True
    report = checkpointer.save(10, contents(10))
    assert report is not None
    assert files.failures
    assert isinstance(report.error, CheckpointError)
    assert os.strerror(code) in str(report.error)
    assert f"errno {code}" in str(report.error)
    assert [r.levelno for r in caplog.records if "iteration 10 was not saved" in r.getMessage()] == [logging.ERROR]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert folders_in(tmp_path) == ["iter_0000005"]
    files.is_armed = False
    saved(checkpointer, 15)
    checkpointer.close()
    assert load(tmp_path) == 15.0


@pytest.mark.parametrize("kind", ["write", "sync", "write_new", "rename", "sync_folder"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_later_failure_leaves_a_whole_checkpoint_or_none(tmp_path: Path, kind: str, after: int) -> None:
    files = FailingFiles(kind, errno.EIO, after=after)
    checkpointer = started(SavePolicy(tmp_path), files)
    checkpointer.save(10, contents(10))
    files.is_armed = False
    for name in folders_in(tmp_path):
        assert name == "iter_0000010"
        open_checkpoint(tmp_path / name, Files())
        assert load(tmp_path) == 10.0
    saved(checkpointer, 15)
    checkpointer.close()
    assert load(tmp_path) == 15.0


def test_a_partial_folder_that_stays_is_swept_at_the_next_start(tmp_path: Path) -> None:
    class Broken(FailingFiles):
        def remove_tree(self, path: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

    checkpointer = started(SavePolicy(tmp_path), Broken("sync"))
    report = checkpointer.save(10, contents(10))
    assert report is not None
    assert isinstance(report.error, CheckpointError)
    checkpointer.close()
    assert folders_in(tmp_path) == [".iter_0000010.n-1.partial"]
    started(SavePolicy(tmp_path)).close()
    assert folders_in(tmp_path) == []


def test_an_undeletable_checkpoint_does_not_fail_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = started(SavePolicy(tmp_path, retention=Retention(1)), FailingFiles("remove_tree"))
    saved(checkpointer, 1)
    saved(checkpointer, 2)
    checkpointer.close()
    assert "iteration 1 could not be deleted" in caplog.text
    assert load(tmp_path) == 2.0


def test_a_save_without_room_is_refused_before_writing(tmp_path: Path) -> None:
    class Full(Files):
        def free_bytes(self, path: Path) -> int | None:
            return 100

    checkpointer = started(SavePolicy(tmp_path), Full())
    report = checkpointer.save(10, contents(10))
    checkpointer.close()
    assert report is not None
    assert "no room" in str(report.error)
    assert folders_in(tmp_path) == []


def test_a_file_system_that_does_not_tell_its_size_is_saved_to(tmp_path: Path) -> None:
    class Silent(Files):
        def free_bytes(self, path: Path) -> int | None:
            return super().free_bytes(Path("/proc"))  # 0 of 0 blocks, as some network file systems report

    checkpointer = started(SavePolicy(tmp_path), Silent())
    report = checkpointer.save(10, contents(10))
    checkpointer.close()
    assert report is not None
    assert report.error is None
    assert folders_in(tmp_path) == ["iter_0000010"]


@pytest.mark.parametrize(
    ("keep", "saved_before", "abandoned", "advice"),
    [
        (0, 0, 0, "No checkpoint there can be deleted."),
        (1, 1, 0, "No checkpoint there can be deleted: the newest stays until the next is complete."),
        (0, 3, 0, "2 older checkpoints there: {older} B, deleted by the next start with count=1."),
        (2, 2, 0, "1 older checkpoint there: {older} B, deleted by the next start with count=1."),
        (0, 1, 1, "1 abandoned branch there (*.superseded-*): {abandoned} B, to be deleted."),
        (2, 2, 2, "count=1. 2 abandoned branches there (*.superseded-*): {abandoned} B, to be deleted."),
    ],
)
def test_the_advice_on_a_full_disk_is_one_that_works(
    tmp_path: Path, keep: int, saved_before: int, abandoned: int, advice: str
) -> None:
    terms = FolderTerms("another place", "count")
    checkpointer = started(SavePolicy(tmp_path, retention=Retention(keep), terms=terms), room := Room(1 << 30))
    for iteration in range(1, saved_before + 1):
        saved(checkpointer, iteration)
    older = room.allocated_bytes(*(tmp_path / f"iter_{number:07d}" for number in range(1, saved_before)))
    for number in range(abandoned):
        (tmp_path / f"iter_0000009.superseded-{number}").mkdir()
        (tmp_path / f"iter_0000009.superseded-{number}" / "file").write_bytes(bytes(10_000))
    branches = room.allocated_bytes(*tmp_path.glob("*superseded*"))
    room.free_now = 100
    report = checkpointer.save(10, contents(10))
    checkpointer.close()
    assert report is not None
    text = str(report.error)
    expected = re.search(r"expected (\d+) B free, found 100 B free\. Free (\d+) B more, or name another place\. ", text)
    assert expected is not None, text
    assert int(expected[1]) - 100 == int(expected[2])
    assert text.endswith(advice.format(older=older, abandoned=branches))


class Room(Files):
    """A file system with so much room, of which other ranks may have taken a part for their pieces already."""

    def __init__(self, free_bytes: int, taken_bytes: int = 0) -> None:
        self.free_now, self._taken_bytes = free_bytes, taken_bytes

    def free_bytes(self, path: Path) -> int | None:
        return self.free_now

    def allocated_bytes(self, *paths: Path) -> int:
        is_partial = bool(paths) and paths[0].name.endswith(".partial")
        return super().allocated_bytes(*paths) + self._taken_bytes * is_partial


def needed_bytes(root: Path) -> int:
    """Return how much room a save asks for."""
    checkpointer = started(SavePolicy(root), Room(0))
    report = checkpointer.save(10, contents(10))
    checkpointer.close()
    assert report is not None
    found = re.search(r"expected (\d+) B free, found 0 B free", str(report.error))
    assert found is not None, str(report.error)
    return int(found[1])


@pytest.mark.parametrize("taken_bytes", [0, 5000])
def test_space_reserved_by_peers_counts_for_the_same_save(tmp_path: Path, taken_bytes: int) -> None:
    needed = needed_bytes(tmp_path)
    for missing, is_saved in ((1, False), (0, True)):
        checkpointer = started(SavePolicy(tmp_path), Room(needed - taken_bytes - missing, taken_bytes))
        report = checkpointer.save(10, contents(10))
        checkpointer.close()
        assert report is not None
        assert (report.error is None) == is_saved


def test_a_save_asks_for_as_much_room_as_it_takes(tmp_path: Path) -> None:
    checkpointer = started(SavePolicy(tmp_path))
    report = saved(checkpointer, 5)
    checkpointer.close()
    needed, taken = needed_bytes(tmp_path), Files().allocated_bytes(report.path)
    assert 0 < taken <= needed <= taken + (1 << 20)
    assert Files().allocated_bytes(tmp_path / "nothing") == 0


def test_a_save_that_takes_too_long_is_aborted(tmp_path: Path) -> None:
    files, state = StuckFiles(), contents(10)
    checkpointer = started(SavePolicy(tmp_path, commit_timeout_s=0.3), files)
    report = checkpointer.save(10, state)
    assert report is not None
    assert f"A save did not end in time ({tmp_path / 'iter_0000010'})" in str(report.error)
    assert files.reached.is_set()
    state.live[0].local.fill_(-1)
    files.released.set()
    checkpointer.close()
    assert folders_in(tmp_path) == []


def test_a_save_is_refused_after_the_lock_was_taken_over(tmp_path: Path) -> None:
    checkpointer = started(SavePolicy(tmp_path))
    saved(checkpointer, 5)
    thief = {"host": "node-7", "pid": 4711, "nonce": "theirs", "started": 1.0}
    (tmp_path / "lock").write_text(json.dumps(thief))
    report = checkpointer.save(10, contents(10))
    checkpointer.close()
    assert report is not None
    assert isinstance(report.error, LockError)
    assert "node-7" in str(report.error)
    assert folders_in(tmp_path) == ["iter_0000005"]


def test_a_second_run_on_a_folder_is_refused_on_every_rank(tmp_path: Path) -> None:
    first = started(SavePolicy(tmp_path))
    (tmp_path / ".iter_0000001.n-1.partial").mkdir()
    outcomes = run_ranks(2, lambda channel: Checkpointer(SavePolicy(tmp_path), channel, nonce="other").start())
    assert [type(outcome) for outcome in outcomes] == [LockError, LockError]
    assert all(f"pid {os.getpid()}" in str(outcome) for outcome in outcomes)
    assert (tmp_path / ".iter_0000001.n-1.partial").exists()
    first.close()
    started(SavePolicy(tmp_path)).close()


HOLDER = """
import sys
from pathlib import Path
from reprise.commit.channel import single_rank_channel
from reprise.checkpointer import Checkpointer
from reprise.policy import SavePolicy
checkpointer = Checkpointer(SavePolicy(Path(sys.argv[1])), single_rank_channel(), nonce="dead")
checkpointer.start()
print("held", flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_run_is_taken_over(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockError, match=f"pid {holder.pid}"):
            started(SavePolicy(tmp_path))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    checkpointer = started(SavePolicy(tmp_path))
    saved(checkpointer, 5)
    checkpointer.close()


def test_saving_is_off_without_a_folder() -> None:
    checkpointer = started(SavePolicy(None, save_interval=5))
    assert not checkpointer.is_due(5)
    assert checkpointer.save(5, contents(5)) is None
    checkpointer.rewind(0)
    checkpointer.close()


def test_a_save_is_due_at_every_multiple_of_the_interval(tmp_path: Path) -> None:
    every = Checkpointer(SavePolicy(tmp_path, save_interval=5), single_rank_channel(), nonce="n")
    never = Checkpointer(SavePolicy(tmp_path), single_rank_channel(), nonce="n")
    assert [i for i in range(1, 21) if every.is_due(i)] == [5, 10, 15, 20]
    assert not any(never.is_due(i) for i in range(1, 21))


ROWS = Sharding("rows over 2", (Cut("row", 2),))


def save_over_two(root: Path, culprit: int, kind: str) -> list[SaveReport | None]:
    """Save iterations 1 and 2 over two ranks; the file system of `culprit` fails during the first."""
    spec = TensorSpec(TensorKind.MODEL, "w", (50, 40), StoredDtype.F32, (50, 40))

    def call(channel: StoreChannel) -> list[SaveReport | None]:
        files = FailingFiles(kind) if channel.rank == culprit else FailingFiles("none")
        checkpointer = Checkpointer(SavePolicy(root), channel, nonce="n", files=files)
        checkpointer.start()
        reports = []
        for iteration in (1, 2):
            live = tuple(ROWS.live(channel.rank, [spec], {"w": torch.full(spec.shape, float(iteration))}))
            document = {STATE: {"format": FORMAT, "iteration": iteration}}
            reports.append(checkpointer.save(iteration, Contents((spec,), live, {}, document)))
            files.is_armed = False
        checkpointer.close()
        return reports

    first, second = all_ranks(2, call)
    assert second[1] is not None
    assert second[1].error is None
    return [first[0], second[0]]


@pytest.mark.parametrize("kind", ["open_for_writing", "write", "sync"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_of_one_rank_fails_the_save_the_next_works(tmp_path: Path, culprit: int, kind: str) -> None:
    for report in save_over_two(tmp_path, culprit, kind):
        assert report is not None
        assert "Input/output error" in str(report.error)
    assert folders_in(tmp_path) == ["iter_0000002"]
    assert load(tmp_path) == 2.0
