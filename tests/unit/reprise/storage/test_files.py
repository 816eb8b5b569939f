"""What the engine relies on when it calls the file system."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from reprise.errors import CheckpointError
from reprise.storage import files as files_module
from reprise.storage.atomic import make_folders, replace_file
from reprise.storage.files import Files, cannot_write, describe_free_space
from tests import ROOT
from tests.fakes import FailingFiles
from tests.harness import DEADLINE_S
from tests.messages import refused


def views(data: bytes, size: int) -> list[memoryview]:
    return [memoryview(data)[at : at + size] for at in range(0, len(data), size)]


def test_reserve_leaves_what_another_descriptor_wrote(tmp_path: Path) -> None:
    files, data = Files(), os.urandom(40_000)
    first, second = (files.open_for_writing(tmp_path / "shared") for _ in range(2))
    files.reserve(first, 100_000)
    files.write(first, [memoryview(data)], offset=50_000)
    files.reserve(second, 100_000)
    files.write(second, [memoryview(data)], offset=10_000)
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


@pytest.mark.parametrize("most", [13, 1 << 20])
def test_write_goes_on_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """More buffers than one call may take, too."""
    whole_write, data = os.pwritev, os.urandom(5000)

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return whole_write(descriptor, [b"".join(buffers)[:most]] if most < len(data) else buffers, offset)

    monkeypatch.setattr(os, "pwritev", short)
    files = Files()
    descriptor = files.open_for_writing(tmp_path / "f")
    files.write(descriptor, [*views(data, 3), memoryview(b""), memoryview(data)], offset=7)
    assert (tmp_path / "f").read_bytes() == bytes(7) + data + data
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


def test_remove_tree_tells_only_what_it_cannot_remove(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    for _ in range(2):
        Files().remove_tree(tmp_path / "a")
    with pytest.raises(OSError, match="file"):
        Files().remove_tree(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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


def test_a_file_system_that_reports_no_size_has_an_unknown_room() -> None:
    """/proc reports 0 of 0 blocks and 0 of 0 inodes, as some network file systems do."""
    files, proc = Files(), Path("/proc")
    assert os.statvfs(proc).f_blocks == 0
    assert (files.free_bytes(proc), files.free_inodes(proc)) == (None, None)
    assert describe_free_space(files, proc) == "an unknown number of bytes free"


_FULL_OF_FILES = """
import logging, sys
from pathlib import Path
import torch
from tests.unit.reprise.saving.test_checkpointer import contents, started
from reprise.storage.files import Files, cannot_write, describe_free_space
from reprise.saving.policy import SavePolicy
from trainer.doctor.looks import folder

root = Path(sys.argv[1])
checkpointer = started(SavePolicy(root))
number = 0
try:
    while True:
        (root / f"file{number}").touch()
        number += 1
except OSError as error:
    print(error.strerror)
print(checkpointer.save(1, contents(1)).error)
for finding in folder(root):
    print(finding.verdict, finding.found)
checkpointer.close()
"""


@pytest.mark.slow
def test_a_file_system_without_inodes_is_not_called_full(tmp_path: Path) -> None:
    """A real one: a tmpfs of 20 inodes and 64 MiB in a mount namespace of its own."""
    script = f'mount -t tmpfs -o size=64m,nr_inodes=20 none "$1" && exec "{sys.executable}" -c "$2" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]
    try:
        subprocess.run([*command, 'mount -t tmpfs none "$1"', "bash", str(tmp_path)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespaces can be made here: {error}")
    ended = subprocess.run(
        [*command, script, "bash", str(tmp_path), _FULL_OF_FILES],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    full, saved, looked = ended.stdout.splitlines()
    assert full == "No space left on device"
    assert re.search(r"found no inodes left, so no file can be made; [1-9]\d* B free\.", saved), saved
    assert re.search(
        r"^MISSING .*: No space left on device, no inodes left, so no file can be made; \d+ B free$", looked
    )


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        (errno.ENOENT, "new", ["created"]),
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
