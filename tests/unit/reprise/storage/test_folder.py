"""The folder of a run's checkpoints: names, order, tracker, sweep, and what is never touched."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from reprise.storage.files import Files
from reprise.storage.folder import TRACKER, CheckpointFolder, iteration_name
from tests.fakes import FailingFiles


def folder_with(root: Path, *names: str) -> CheckpointFolder:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "content").write_text(name)
    return CheckpointFolder(root, Files())


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_iterations_are_ordered_by_number_beyond_seven_digits(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, *(iteration_name(i) for i in (10_000_000, 9_999_999, 5, 123_456_789, 40)))
    assert folder.committed() == [5, 40, 9_999_999, 10_000_000, 123_456_789]


def test_only_folders_of_the_exact_name_are_checkpoints(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, "iter_0000001", "iter_2", "iter_00000003", "iter_0000004.superseded-1", ".iter_0000005.n-1.partial",
        "xiter_0000006", "iter_0000007x", "iter_٠٠٠٠٠٠٨", "iter_-000009",
    )  # fmt: skip
    (tmp_path / "iter_0000010").write_text("a file")
    (tmp_path / "iter_0000011").symlink_to(tmp_path / "iter_0000001")
    assert folder.committed() == [1]


def test_a_missing_folder_holds_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "none", Files())
    assert folder.committed() == []
    assert folder.sweep() == []
    assert folder.tracker() is None


def test_a_folder_that_cannot_be_looked_at_does_not_hold_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / ("x" * 300), Files())
    for look in (folder.committed, folder.stamps, folder.non_folders, folder.superseded):
        with pytest.raises(OSError, match="too long"):
            look()


def test_sweep_removes_leftovers_and_nothing_similar(tmp_path: Path) -> None:
    leftovers = {".iter_0000001.n-1.partial", ".iter_0000002.a.b-3.deleting", ".iter_10000000.n-1.partial"}
    similar = {
        "iter_0000001.n-1.partial", ".iter_0000001.partial", ".iter_01.n-1.partial", ".iter_0000001.n-1.partial.bak",
        ".iter_0000001.n-1.deleted", "iter_0000003", "iter_0000003.superseded-1", ".hidden", "partial",
    }  # fmt: skip
    folder = folder_with(tmp_path, *leftovers, *similar)
    (tmp_path / ".iter_0000008.n-1.partial").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".iter_0000009.n-1.partial").symlink_to(tmp_path / "elsewhere")
    assert {path.name for path in folder.sweep()} == leftovers
    others = {".iter_0000008.n-1.partial", ".iter_0000009.n-1.partial", "elsewhere"}
    assert names_in(tmp_path) == similar | others | {TRACKER}
    assert folder.sweep() == []


def test_what_cannot_be_swept_is_named_and_in_nobodys_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_with(tmp_path, ".iter_0000001.n-1.partial", "iter_0000002")
    folder = CheckpointFolder(tmp_path, FailingFiles("remove_tree"))
    assert folder.sweep() == []
    assert ".iter_0000001.n-1.partial could not be swept" in caplog.text
    assert folder.committed() == [2]


@pytest.mark.parametrize(("left", "newest"), [(None, 40), ("7\n", 40), ("40\n", 40), ("nonsense", 40)])
def test_sweep_lets_the_tracker_name_the_newest_checkpoint(tmp_path: Path, left: str | None, newest: int) -> None:
    folder = folder_with(tmp_path, "iter_0000007", "iter_0000040", "iter_0000050.superseded-1")
    (tmp_path / f".{TRACKER}.new").write_text("4")
    if left is not None:
        (tmp_path / TRACKER).write_text(left)
    folder.sweep()
    assert folder.tracker() == newest
    assert not (tmp_path / f".{TRACKER}.new").exists()


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([], "names iteration 9, but the newest checkpoint is iter_0000007: newer ones were removed"),
        (["iter_0000009.superseded-1"], None),
        (["iter_0000009"], None),
    ],
)
def test_a_tracker_newer_than_the_folders_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, others: list[str], words: str | None
) -> None:
    folder = CheckpointFolder(tmp_path, Files())
    for name in ("iter_0000007", *others):
        (tmp_path / name).mkdir()
    (tmp_path / TRACKER).write_text("9\n")
    folder.sweep()
    assert (words in caplog.text) if words else caplog.records == []
    assert folder.tracker() == (9 if others == ["iter_0000009"] else 7)


def test_superseding_takes_the_tracker_back_with_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "iter_0000007", "iter_0000040")
    folder.sweep()
    folder.supersede([40])
    assert folder.tracker() == 7
    folder.supersede([7])
    assert not (tmp_path / TRACKER).exists()


class Dying(Files):
    """Dies, for its caller, before the rename of this number."""

    def __init__(self, renames: int) -> None:
        self._left = renames

    def rename(self, source: Path, target: Path) -> None:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1
        super().rename(source, target)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("renames", [0, 1, 2, 3])
def test_a_replacing_commit_killed_anywhere_loses_neither(tmp_path: Path, renames: int, replaces: bool) -> None:
    folder_with(tmp_path, "iter_0000007", ".iter_0000007.n-2.partial")
    with pytest.raises(KeyboardInterrupt):
        CheckpointFolder(tmp_path, Dying(renames)).commit(7, "n-2", replaces=replaces)
    folder = CheckpointFolder(tmp_path, Files())
    folder.sweep()
    contents = {name: (tmp_path / name / "content").read_text() for name in names_in(tmp_path) - {TRACKER}}
    # The first rename finds the old one in the way, the second puts it aside, the third is the commit.
    is_committed = renames == 3
    if is_committed:
        old = {} if replaces else {"iter_0000007.superseded-1": "iter_0000007"}
        assert contents == {"iter_0000007": ".iter_0000007.n-2.partial", **old}
    else:
        assert contents == {"iter_0000007": "iter_0000007"}


def test_a_commit_whose_partial_folder_was_swept_changes_nothing(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "iter_0000007")
    with pytest.raises(FileNotFoundError):
        folder.commit(7, "n-2")
    assert names_in(tmp_path) == {"iter_0000007"}


def test_commit_names_the_folder_and_replaces_the_tracker(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, ".iter_0000007.n-1.partial")
    assert folder.commit(7, "n-1")
    assert (tmp_path / TRACKER).read_text() == "7\n"
    assert folder.tracker() == 7
    assert names_in(tmp_path) == {"iter_0000007", TRACKER}


class CountedFiles(Files):
    """Files that note their syncs."""

    def __init__(self) -> None:
        self.synced: list[str] = []
        self.batches = 0

    def sync_together(self, syncs: Sequence[Callable[[], None]]) -> None:
        self.batches += 1
        super().sync_together(syncs)

    def sync(self, descriptor: int) -> None:
        self.synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        super().sync(descriptor)

    def sync_folder(self, path: Path) -> None:
        self.synced.append(f"{path.name}/")
        super().sync_folder(path)


def test_a_commit_syncs_its_name_beside_the_next_tracker(tmp_path: Path) -> None:
    files = CountedFiles()
    folder_with(tmp_path, ".iter_0000007.n-1.partial")
    CheckpointFolder(tmp_path, files).commit(7, "n-1")
    assert files.batches == 1
    assert sorted(files.synced) == sorted([f".{TRACKER}.new", f"{tmp_path.name}/"])
    assert names_in(tmp_path) == {"iter_0000007", TRACKER}


def test_a_commit_of_an_older_iteration_leaves_the_tracker(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "iter_0000007", ".iter_0000005.n-1.partial")
    folder.commit(5, "n-1")
    assert folder.tracker() == 7
    assert names_in(tmp_path) == {"iter_0000005", "iter_0000007", TRACKER}


def test_a_replacing_commit_keeps_the_old_checkpoint_renamed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "iter_0000007", "iter_0000007.superseded-1", ".iter_0000007.n-2.partial")
    folder.commit(7, "n-2")
    assert (tmp_path / "iter_0000007/content").read_text() == ".iter_0000007.n-2.partial"
    assert (tmp_path / "iter_0000007.superseded-1/content").read_text() == "iter_0000007.superseded-1"
    assert (tmp_path / "iter_0000007.superseded-2/content").read_text() == "iter_0000007"


def test_a_failed_commit_restores_the_old_checkpoint_s_name(tmp_path: Path) -> None:
    folder_with(tmp_path, "iter_0000007", ".iter_0000007.n-2.partial")

    class OneRename(Files):
        def rename(self, source: Path, target: Path) -> None:
            if source.name.endswith(".partial"):
                raise OSError(errno.EIO, "Input/output error")
            super().rename(source, target)

    with pytest.raises(OSError, match="Input/output"):
        CheckpointFolder(tmp_path, OneRename()).commit(7, "n-2")
    assert names_in(tmp_path) == {"iter_0000007", ".iter_0000007.n-2.partial"}
    assert (tmp_path / "iter_0000007/content").read_text() == "iter_0000007"


class Unsynced(Files):
    """A file system that cannot make names in a folder durable, nor rename into the names that are refused."""

    def __init__(self, root: Path, *refused: str) -> None:
        self._root, self._refused = root, refused

    def sync_folder(self, path: Path) -> None:
        if path == self._root:
            raise OSError(errno.EIO, "Input/output error")

    def rename(self, source: Path, target: Path) -> None:
        if target.name.endswith(self._refused):
            raise OSError(errno.EIO, "Input/output error")
        super().rename(source, target)


@pytest.mark.parametrize("before", [[], ["iter_0000007"]])
def test_a_commit_that_is_not_durable_is_taken_back(tmp_path: Path, before: list[str]) -> None:
    folder_with(tmp_path, *before, ".iter_0000007.n-2.partial")
    with pytest.raises(OSError, match="Input/output"):
        CheckpointFolder(tmp_path, Unsynced(tmp_path)).commit(7, "n-2")
    assert names_in(tmp_path) == {*before, ".iter_0000007.n-2.partial"}
    assert all((tmp_path / name / "content").read_text() == name for name in names_in(tmp_path))


@pytest.mark.parametrize("before", [[], ["iter_0000007"]])
def test_a_commit_that_cannot_be_taken_back_stands(
    tmp_path: Path, before: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder_with(tmp_path, *before, ".iter_0000007.n-2.partial")
    assert not CheckpointFolder(tmp_path, Unsynced(tmp_path, ".partial")).commit(7, "n-2")
    assert "iter_0000007 is there, but may not be durable" in caplog.text
    assert (tmp_path / "iter_0000007/content").read_text() == ".iter_0000007.n-2.partial"
    assert names_in(tmp_path) - {TRACKER} == {"iter_0000007", *(f"{name}.superseded-1" for name in before)}


def test_a_replaced_checkpoint_comes_back_at_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_with(tmp_path, "iter_0000007", ".iter_0000007.n-2.partial")

    class Once(Unsynced):
        def rename(self, source: Path, target: Path) -> None:
            if source.name.endswith(".replaced"):
                raise OSError(errno.EIO, "Input/output error")
            super().rename(source, target)

    with pytest.raises(OSError, match="Input/output"):
        CheckpointFolder(tmp_path, Once(tmp_path)).commit(7, "n-2")
    assert "waits as" in caplog.text
    CheckpointFolder(tmp_path, Files()).sweep()
    assert (tmp_path / "iter_0000007/content").read_text() == "iter_0000007"
    assert names_in(tmp_path) - {TRACKER} == {"iter_0000007"}


def test_a_replaced_folder_without_a_name_undoes_no_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_with(tmp_path, "iter_0000007", ".iter_0000007.n-2.partial")

    class Nameless(Files):
        def rename(self, source: Path, target: Path) -> None:
            if ".superseded-" in target.name:
                raise OSError(errno.EIO, "Input/output error")
            super().rename(source, target)

    assert CheckpointFolder(tmp_path, Nameless()).commit(7, "n-2")
    assert "waits as" in caplog.text
    CheckpointFolder(tmp_path, Files()).sweep()
    contents = {name: (tmp_path / name / "content").read_text() for name in names_in(tmp_path) - {TRACKER}}
    assert contents == {"iter_0000007": ".iter_0000007.n-2.partial", "iter_0000007.superseded-1": "iter_0000007"}


def test_a_tracker_that_cannot_be_written_does_not_undo_a_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_with(tmp_path, ".iter_0000007.n-2.partial")
    CheckpointFolder(tmp_path, FailingFiles("write_new", errno.ENOSPC)).commit(7, "n-2")
    assert names_in(tmp_path) == {"iter_0000007"}
    assert TRACKER in caplog.text


@pytest.mark.parametrize("text", ["", "release\n", "x7", "7.5"])
def test_a_tracker_of_nonsense_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / TRACKER).write_text(text)
    assert CheckpointFolder(tmp_path, Files()).tracker() is None


def test_a_pipe_in_the_place_of_the_tracker_is_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TRACKER)
    assert CheckpointFolder(tmp_path, Files()).tracker() is None


def test_discard_makes_a_checkpoint_go_before_its_files_do(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "iter_0000007")
    gone = folder.discard(7, "n-1")
    assert folder.committed() == []
    assert (gone / "content").exists()
    assert folder.discarded("n-1") == folder.discarded("n") == [gone]
    assert folder.discarded("n-10") == folder.discarded("m") == []
    assert folder.sweep() == [gone]
