"""What the engine relies on when it calls the file system."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from reprise.errors import CheckpointError
from reprise.storage import files as files_module
from reprise.storage.atomic import make_folders, replace_file
from reprise.storage.files import Files, cannot_write, describe_free_space
from tests.fakes import FailingFiles
from tests.messages import refused


def test_reserve_leaves_what_another_descriptor_wrote(tmp_path: Path) -> None:
    files, data = Files(), os.urandom(40_000)
    first, second = (files.open_for_writing(tmp_path / "shared") for _ in range(2))
    files.reserve(first, 100_000)
    files.write(first, memoryview(data), offset=50_000)
    files.reserve(second, 100_000)
    files.write(second, memoryview(data), offset=10_000)
    files.reserve(first, 10)  # never shortens it
    found = (tmp_path / "shared").read_bytes()
    assert found == bytes(10_000) + data + data + bytes(10_000)
    files.close(first)
    files.close(second)


def test_reserve_tells_when_there_is_no_room(tmp_path: Path) -> None:
    files = Files()
    descriptor = files.open_for_writing(tmp_path / "f")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is checked below
        files.reserve(descriptor, 1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    files.close(descriptor)


def test_write_goes_on_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_write, data = os.pwritev, os.urandom(5000)

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return whole_write(descriptor, [buffers[0][:13]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    files = Files()
    descriptor = files.open_for_writing(tmp_path / "f")
    files.write(descriptor, memoryview(data), offset=7)
    assert (tmp_path / "f").read_bytes() == bytes(7) + data
    files.close(descriptor)


def test_read_returns_less_only_at_the_end(tmp_path: Path) -> None:
    files = Files()
    (tmp_path / "f").write_bytes(b"0123456789")
    descriptor, buffer = files.open_for_reading(tmp_path / "f"), bytearray(6)
    assert files.read(descriptor, memoryview(buffer), offset=2) == 6
    assert bytes(buffer) == b"234567"
    assert files.read(descriptor, memoryview(buffer), offset=7) == 3
    files.close(descriptor)


def test_a_folder_a_file_or_a_link_is_removed_once_or_again(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    for name in ("a", "file", "link") * 2:
        Files().remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("kind", ["write", "sync", "rename"])
def test_replace_file_that_fails_leaves_the_old_content(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tracker"
    replace_file(Files(), path, b"old, and longer")
    with pytest.raises(OSError, match="No space"):
        replace_file(FailingFiles(kind, errno.ENOSPC), path, b"new")
    assert path.read_bytes() == b"old, and longer"
    replace_file(Files(), path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["tracker"]


def test_size_refuses_what_is_no_regular_file(tmp_path: Path) -> None:
    files = Files()
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert files.size(tmp_path / "file") == 3
    for name in ("link", "pipe", "missing", "."):
        with pytest.raises(OSError):  # noqa: PT011 - any errno refuses
            files.size(tmp_path / name)


def test_folders_that_are_made_have_their_names_synced(tmp_path: Path) -> None:
    class Noting(Files):
        def sync_folder(self, path: Path) -> None:
            synced.append((path, sorted(child.name for child in path.iterdir())))
            super().sync_folder(path)

    synced = list[tuple[Path, list[str]]]()
    make_folders(Noting(), tmp_path / "a" / "b" / "c")
    assert sorted(synced) == [(tmp_path, ["a"]), (tmp_path / "a", ["b"]), (tmp_path / "a/b", ["c"])]
    synced.clear()
    make_folders(Noting(), tmp_path / "a" / "b" / "c")
    assert synced == []
    make_folders(Noting(), tmp_path / "a" / "b" / "d")
    assert synced == [(tmp_path / "a/b", ["c", "d"])]


def test_reserve_goes_on_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        """A C library whose first calls of fallocate are interrupted."""

        left = 2

        def fallocate(self, descriptor: int, mode: int, offset: ctypes.c_int64, length: ctypes.c_int64) -> int:
            if self.left:
                self.left -= 1
                ctypes.set_errno(errno.EINTR)
                return -1
            return int(real.fallocate(descriptor, mode, offset, length))

    real, fake = files_module._libc, Interrupted()
    monkeypatch.setattr(files_module, "_libc", fake)
    files = Files()
    descriptor = files.open_for_writing(tmp_path / "f")
    files.reserve(descriptor, 100_000)
    assert (fake.left, os.fstat(descriptor).st_size) == (0, 100_000)
    files.close(descriptor)


def test_a_file_system_that_reports_no_size_has_an_unknown_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc reports 0 of 0 blocks and 0 of 0 inodes, as some network file systems do."""
    files, proc = Files(), Path("/proc")
    assert os.statvfs(proc).f_blocks == 0
    assert files.free_bytes(proc) is None
    assert describe_free_space(files, proc) == "an unknown number of bytes free"
    status = [*os.statvfs(proc)]
    status[5:8] = (1000, 0, 0)  # all, free and available inodes
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(status))
    assert describe_free_space(files, proc).startswith("no inodes left")


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        (errno.ENOENT, "a/new", ["a/new", "errno 2"]),
        (errno.ENOSPC, "new", ["7 B free", "somewhere else"]),
        (errno.EACCES, "new", ["permissions", "somewhere else"]),
        (errno.EIO, "new", ["somewhere else"]),
    ],
)
def test_a_folder_that_cannot_be_written_is_explained(tmp_path: Path, code: int, name: str, words: list[str]) -> None:
    class Full(Files):
        def free_bytes(self, path: Path) -> int | None:
            return 7

    error = OSError(code, os.strerror(code), str(tmp_path / name))
    with refused(CheckpointError, str(tmp_path), *words):
        raise cannot_write(tmp_path / name, error, files=Full(), another="somewhere else")


def test_a_folder_of_any_depth_is_listed(tmp_path: Path) -> None:
    folders = [tmp_path]
    for _ in range(1100):  # more than Python calls deep
        folders.append(folders[-1] / "a")
        folders[-1].mkdir()
    (folders[-1] / "file").touch()
    assert [*Files().tree(tmp_path)] == ["a/" * 1100 + "file"]
    (folders[-1] / "file").unlink()
    for folder in reversed(folders[1:]):
        folder.rmdir()
