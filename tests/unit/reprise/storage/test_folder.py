"""The folder of a run's checkpoints: names, order, tracker, sweep, and what is never touched."""

from __future__ import annotations

import errno
import os
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


def test_only_folders_of_the_exact_name_are_checkpoints(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, "iter_0000001", "iter_2", "iter_00000003", "iter_0000004.superseded-1", ".iter_0000005.n-1.partial",
        "xiter_0000006", "iter_0000007x", "iter_٠٠٠٠٠٠٨", "iter_-000009",
    )  # fmt: skip
    (tmp_path / "iter_0000010").write_text("a file")
    (tmp_path / "iter_0000011").symlink_to(tmp_path / "iter_0000001")
    assert folder.committed() == [1]
    folder_with(tmp_path, *(iteration_name(i) for i in (10_000_000, 9_999_999, 123_456_789, 40)))
    assert folder.committed() == [1, 40, 9_999_999, 10_000_000, 123_456_789]
    absent = CheckpointFolder(tmp_path / "none", Files())
    assert (absent.committed(), absent.sweep(), absent.tracker()) == ([], [], None)


def test_a_folder_that_cannot_be_looked_at_does_not_hold_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / ("x" * 300), Files())
    for look in (folder.committed, folder.taken, folder.superseded):
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
    folder = CheckpointFolder(tmp_path, FailingFiles("remove"))
    assert folder.sweep() == []
    assert ".iter_0000001.n-1.partial waits for the next start" in caplog.text
    assert folder.committed() == [2]


@pytest.mark.parametrize("left", [None, "7\n", "40\n", "", "7.5", "pipe"])
def test_sweep_lets_the_tracker_name_the_newest_checkpoint(tmp_path: Path, left: str | None) -> None:
    folder = folder_with(tmp_path, "iter_0000007", "iter_0000040", "iter_0000050.superseded-1")
    if left == "pipe":
        os.mkfifo(tmp_path / TRACKER)
    elif left is not None:
        (tmp_path / TRACKER).write_text(left)
    folder.sweep()
    assert (tmp_path / TRACKER).read_text() == "40\n"
    folder.supersede([40])
    assert folder.tracker() == 7
    folder.supersede([7])
    assert not (tmp_path / TRACKER).exists()


def test_a_tracker_alone_stays(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("9\n")
    folder = CheckpointFolder(tmp_path, Files())
    folder.sweep()
    assert folder.tracker() == 9  # nothing else shows that there was a run


OLD_AND_NEW = ("iter_0000007", ".iter_0000007.n-2.partial")


def contents_of(root: Path) -> dict[str, str]:
    """Return by folder the name that it was made with."""
    return {name: (root / name / "content").read_text() for name in names_in(root) - {TRACKER}}


class Dying(Files):
    """Dies, for its caller, before the rename of this number."""

    def __init__(self, renames: int) -> None:
        self._left = renames

    def rename(self, source: Path, target: Path) -> None:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1
        super().rename(source, target)


@pytest.mark.parametrize(("renames", "replaces"), [(n, replaces) for n in range(4) for replaces in (False, True)][:-1])
def test_a_replacing_commit_killed_anywhere_loses_neither(tmp_path: Path, renames: int, replaces: bool) -> None:
    folder_with(tmp_path, *OLD_AND_NEW)
    with pytest.raises(KeyboardInterrupt):
        CheckpointFolder(tmp_path, Dying(renames)).commit(7, "n-2", replaces=replaces)
    folder = CheckpointFolder(tmp_path, Files())
    folder.sweep()
    # The first rename puts the old one aside, the second is the commit. The third names the old one, unless a replacing
    # commit deletes it, and the last one the tracker.
    is_committed = renames >= 2
    kept = {} if replaces else {"iter_0000007.superseded-1": "iter_0000007"}
    assert contents_of(tmp_path) == (
        {"iter_0000007": OLD_AND_NEW[1], **kept} if is_committed else {"iter_0000007": "iter_0000007"}
    )


def test_a_commit_names_the_newest_and_keeps_the_replaced(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, ".iter_0000007.n-1.partial", ".iter_0000005.n-2.partial")
    assert folder.commit(7, "n-1")
    assert names_in(tmp_path) == {"iter_0000007", ".iter_0000005.n-2.partial", TRACKER}
    folder.commit(5, "n-2")  # an older iteration
    assert folder.tracker() == 7
    with pytest.raises(FileNotFoundError):  # its folder was swept
        folder.commit(7, "n-3")
    for attempt in ("n-4", "n-5"):
        folder_with(tmp_path, f".iter_0000007.{attempt}.partial")
        folder.commit(7, attempt)
    folder_with(tmp_path, ".iter_0000007.n-6.partial")
    folder.commit(7, "n-6", replaces=True)
    attempts = {"iter_0000007.superseded-1": "n-1", "iter_0000007.superseded-2": "n-4", "iter_0000007": "n-6"}
    partials = {name: f".iter_0000007.{attempt}.partial" for name, attempt in attempts.items()}
    assert contents_of(tmp_path) == {"iter_0000005": ".iter_0000005.n-2.partial", **partials}


class Refusing(Files):
    """A disk that does not rename some folders, by how either name ends, nor make names in a folder durable."""

    def __init__(self, *names: str, unsynced: Path | None = None) -> None:
        self._names, self._unsynced = names, unsynced

    def sync_folder(self, path: Path) -> None:
        if path == self._unsynced:
            raise OSError(errno.EIO, "Input/output error")

    def rename(self, source: Path, target: Path) -> None:
        renamed = f"{source.name}>{target.name}"
        if any(name in renamed for name in self._names):
            raise OSError(errno.EIO, "Input/output error")
        super().rename(source, target)


@pytest.mark.parametrize(
    ("names", "is_unsynced"), [([".partial>"], False), ([], True)], ids=["not renamed", "not durable"]
)
@pytest.mark.parametrize("before", [[], ["iter_0000007"]])
def test_a_commit_that_fails_is_taken_back(
    tmp_path: Path, before: list[str], names: list[str], is_unsynced: bool
) -> None:
    folder_with(tmp_path, *before, OLD_AND_NEW[1])
    files = Refusing(*names, unsynced=tmp_path if is_unsynced else None)
    with pytest.raises(OSError, match="Input/output"):
        CheckpointFolder(tmp_path, files).commit(7, "n-2")
    assert contents_of(tmp_path) == {name: name for name in (*before, OLD_AND_NEW[1])}


@pytest.mark.parametrize("before", [[], ["iter_0000007"]])
def test_a_commit_that_cannot_be_taken_back_stands(
    tmp_path: Path, before: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder_with(tmp_path, *before, OLD_AND_NEW[1])
    folder = CheckpointFolder(tmp_path, Refusing(">.iter_0000007.n-2.partial", unsynced=tmp_path))
    assert not folder.commit(7, "n-2", replaces=True)  # deletes nothing
    assert "iter_0000007 is there, but may not be durable" in caplog.text
    kept = dict.fromkeys([".iter_0000007.n-2.outdated.replaced"] * len(before), "iter_0000007")
    assert contents_of(tmp_path) == {"iter_0000007": OLD_AND_NEW[1], **kept}


@pytest.mark.parametrize(
    ("refused", "is_committed"), [(".replaced>", False), (".superseded-", True)], ids=["comes back", "is superseded"]
)
def test_a_replaced_folder_gets_its_name_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str, is_committed: bool
) -> None:
    folder_with(tmp_path, *OLD_AND_NEW)
    folder = CheckpointFolder(tmp_path, Refusing(refused, unsynced=None if is_committed else tmp_path))
    if is_committed:
        assert folder.commit(7, "n-2")
    else:
        with pytest.raises(OSError, match="Input/output"):
            folder.commit(7, "n-2")
    assert "waits for the next start" in caplog.text
    CheckpointFolder(tmp_path, Files()).sweep()
    new = {"iter_0000007": OLD_AND_NEW[1], "iter_0000007.superseded-1": "iter_0000007"}
    assert contents_of(tmp_path) == (new if is_committed else {"iter_0000007": "iter_0000007"})


def test_a_tracker_that_cannot_be_written_does_not_undo_a_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_with(tmp_path, ".iter_0000007.n-2.partial")
    CheckpointFolder(tmp_path, FailingFiles("write_new", errno.ENOSPC)).commit(7, "n-2")
    assert names_in(tmp_path) == {"iter_0000007"}
    assert TRACKER in caplog.text


def test_a_deletion_is_durable_before_its_files_go(tmp_path: Path) -> None:
    folder_with(tmp_path, "iter_0000007", "iter_0000008.superseded-1")
    for name in ("iter_0000007", "iter_0000008.superseded-1"):
        folder = CheckpointFolder(tmp_path, FailingFiles("remove"))
        with pytest.raises(OSError, match="Input/output"):
            folder.delete(tmp_path / name, "n-1")
    assert folder.committed() == []
    leaving = [tmp_path / f".{name}.n-1.deleting" for name in ("iter_0000007", "iter_0000008.superseded-1")]
    assert all((path / "content").exists() for path in leaving)
    with pytest.raises(OSError, match="Input/output"):
        CheckpointFolder(tmp_path, FailingFiles("sync_folder")).delete(folder_with(tmp_path, "x").root / "x", "n-2")
    assert (tmp_path / ".x.n-2.deleting/content").exists()
    assert CheckpointFolder(tmp_path, Files()).sweep() == leaving
