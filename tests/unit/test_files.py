"""What the engine relies on when it calls the file system."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes import FailingFiles
from trainer.checkpoint.files import Files, make_folders, replace_file


def views(data: bytes, size: int) -> list[memoryview]:
    return [memoryview(data)[at : at + size] for at in range(0, len(data), size)]


def test_reserve_leaves_what_another_descriptor_wrote(tmp_path: Path) -> None:
    files, data = Files(), os.urandom(40_000)
    first, second = (files.open_for_writing(tmp_path / "shared") for _ in range(2))
    files.reserve(first, 100_000)
    files.write(first, [memoryview(data)], offset=50_000)
    files.reserve(second, 100_000)
    files.write(second, [memoryview(data)], offset=10_000)
    files.reserve(first, 100_000)
    found = (tmp_path / "shared").read_bytes()
    assert found == bytes(10_000) + data + data + bytes(10_000)
    files.close(first)
    files.close(second)


def test_reserve_never_shortens_a_file(tmp_path: Path) -> None:
    files = Files()
    descriptor = files.open_for_writing(tmp_path / "f")
    files.write(descriptor, [memoryview(b"x" * 100)], offset=0)
    files.reserve(descriptor, 10)
    files.reserve(descriptor, 0)
    assert os.fstat(descriptor).st_size == 100
    files.close(descriptor)


def test_reserve_tells_when_there_is_no_room(tmp_path: Path) -> None:
    files = Files()
    descriptor = files.open_for_writing(tmp_path / "f")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is checked below
        files.reserve(descriptor, 1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    files.close(descriptor)


def test_write_takes_more_buffers_than_one_call_may(tmp_path: Path) -> None:
    files, data = Files(), os.urandom(5000)
    descriptor = files.open_for_writing(tmp_path / "f")
    files.write(descriptor, [*views(data, 3), memoryview(b"")], offset=7)
    assert (tmp_path / "f").read_bytes() == bytes(7) + data
    files.close(descriptor)


def test_write_goes_on_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_write, data = os.pwritev, os.urandom(3000)

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return whole_write(descriptor, [b"".join(buffers)[:13]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    files = Files()
    descriptor = files.open_for_writing(tmp_path / "f")
    files.write(descriptor, views(data, 5), offset=0)
    files.write(descriptor, [memoryview(data)], offset=3000)
    assert (tmp_path / "f").read_bytes() == data + data
    files.close(descriptor)


def test_write_of_very_many_small_buffers_takes_linear_time(tmp_path: Path) -> None:
    files, data = Files(), bytes(8 * 200_000)
    descriptor = files.open_for_writing(tmp_path / "f")
    start = time.thread_time()  # of this thread alone, however busy the machine is
    files.write(descriptor, views(data, 8), offset=0)
    assert time.thread_time() - start < 2.0  # 0.1 s when linear, 5 s when quadratic
    files.close(descriptor)


def test_read_returns_less_only_at_the_end(tmp_path: Path) -> None:
    files = Files()
    (tmp_path / "f").write_bytes(b"0123456789")
    descriptor, buffer = files.open_for_reading(tmp_path / "f"), bytearray(6)
    assert files.read(descriptor, memoryview(buffer), offset=2) == 6
    assert bytes(buffer) == b"234567"
    assert files.read(descriptor, memoryview(buffer), offset=7) == 3
    files.close(descriptor)


def test_remove_tree_of_a_missing_path_is_fine(tmp_path: Path) -> None:
    files = Files()
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_bytes(b"x")
    files.remove_tree(tmp_path / "a")
    files.remove_tree(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_remove_tree_tells_what_it_cannot_remove(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OSError, match="file"):
        Files().remove_tree(tmp_path / "file")


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
