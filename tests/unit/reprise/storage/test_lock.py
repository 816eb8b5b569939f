"""One writer per folder, whatever becomes of the last one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reprise.errors import LockError
from reprise.storage import lease
from reprise.storage import lock as lock_module
from reprise.storage.lock import STALE_S, FolderLock, is_locked
from tests.fakes import JOIN_S, run_ranks
from tests.messages import refused

PARENT = """
import os, sys
from pathlib import Path
from reprise.storage.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "theirs")
lock.acquire()
if os.fork() == 0:
    print(os.getpid(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def killed_parent(folder: Path) -> Iterator[int]:
    """Give the pid of a child whose parent held the lock of a folder and was killed; end the child after that."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait(JOIN_S)
            yield pid
        finally:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def nobody_is_dead() -> None:
    lock_module._dead_heartbeats.clear()


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[FolderLock]:
    """Return the lock of a folder that this job holds."""
    with FolderLock(tmp_path, "mine") as lock:
        yield lock


def leave_record(folder: Path, *, host: str, age_s: float) -> None:
    record = {"host": host, "pid": 4711, "nonce": "theirs", "started": 1.0}
    (folder / "lock").write_text(json.dumps(record))
    then = time.time() - age_s
    os.utime(folder / "lock", (then, then))


def test_a_second_lock_is_refused_naming_pid_and_host(tmp_path: Path) -> None:
    first = FolderLock(tmp_path / "new", "mine")
    first.acquire()
    with pytest.raises(LockError) as caught:
        FolderLock(tmp_path / "new", "theirs").acquire()
    assert f"host {socket.gethostname()}, pid {os.getpid()}" in str(caught.value)
    first.check()
    assert is_locked(tmp_path / "new")
    first.release()
    first.release()
    assert [is_locked(tmp_path / name) for name in ("new", "missing", "x" * 300)] == [False, False, True]
    with FolderLock(tmp_path / "new", "theirs") as second:
        second.check()
        with pytest.raises(LockError):
            first.check()


def test_a_forked_child_does_not_keep_a_dead_parent_s_lock(tmp_path: Path) -> None:
    with killed_parent(tmp_path) as child:
        lock = FolderLock(tmp_path, "mine")
        lock.acquire()
        os.kill(child, 0)  # it is still there
        lock.check()
        lock.release()


def test_a_fork_leaves_the_lock_with_the_parent(tmp_path: Path, lock: FolderLock) -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(LockError):
        FolderLock(tmp_path, "theirs").acquire()
    lock.check()


def watching(
    folder: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object] = lambda look: None
) -> tuple[FolderLock, list[float]]:
    """Return a lock and its waits between looks at the lock of another; at each, the other does what it does."""
    waits: list[float] = []

    def look(seconds: float) -> None:
        waits.append(seconds)
        act(len(waits))

    monkeypatch.setattr(time, "sleep", look)
    return FolderLock(folder, "mine"), waits


# How far the clock of the holder's host is ahead of this one's, in seconds.
@pytest.mark.parametrize("ahead_s", [-86400.0, 300.0])
@pytest.mark.parametrize("event", [None, 1, 15, "released", "taken"])
def test_a_silent_holder_is_taken_for_dead_by_any_clock(
    tmp_path: Path,
    ahead_s: float,
    event: int | str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # At the first look its clock is set; later it beats.
    leave_record(tmp_path, host="node-7", age_s=20.0 if event == 1 else -ahead_s)

    def act(look: int) -> None:
        if event == "released":
            os.truncate(tmp_path / "lock", 0)
        elif event == "taken":
            leave_record(tmp_path, host="node-8", age_s=-ahead_s)
        elif look == event:
            os.utime(tmp_path / "lock", (time.time() + ahead_s,) * 2)

    lock, looks = watching(tmp_path, monkeypatch, act)
    if event in (None, "released"):
        with lock:
            lock.check()
        assert f"host node-7, pid 4711: waiting for it to end, at most {STALE_S:.0f} s" in caplog.text
    else:
        holder = "node-8" if event == "taken" else "node-7"
        with refused(LockError, holder, "pid 4711"):
            lock.acquire()
        assert holder in (tmp_path / "lock").read_text()
    assert len(looks) == {None: STALE_S, "released": 1, "taken": 1}.get(event, event)


def test_the_locks_of_one_dead_job_are_watched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks_at = []
    for name, age_s in (("run", 100.0), ("checkpoints", 90.0), ("touched since", 0.0)):
        (tmp_path / name).mkdir()
        leave_record(tmp_path / name, host="node-7", age_s=age_s)
        lock, looks = watching(tmp_path / name, monkeypatch)
        lock.acquire()
        lock.release()
        looks_at.append(len(looks))
    assert looks_at == [STALE_S, 0, STALE_S]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
        server.bind(path.name)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, make_socket, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "folder", "socket", "device"],
)
def test_a_lock_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "lock")
    before = os.listdir("/proc/self/fd")
    (error,) = run_ranks(1, lambda _: FolderLock(tmp_path, "mine").acquire())  # on a thread: it must not wait
    assert isinstance(error, OSError)
    assert len(os.listdir("/proc/self/fd")) <= len(before)  # those of an earlier test may go meanwhile


def test_a_lock_that_becomes_a_pipe_does_not_block_its_holder(tmp_path: Path, lock: FolderLock) -> None:
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    (error,) = run_ranks(1, lambda _: lock.check())  # on a thread: it must not wait
    assert isinstance(error, OSError)  # it proves no other writer
    assert "not a regular file" in str(error)


def test_only_a_readable_lock_names_a_holder(tmp_path: Path, lock: FolderLock) -> None:
    lock.check()
    record = (tmp_path / "lock").read_bytes()
    for content in (b"", record.replace(b"mine", b"theirs")):
        (tmp_path / "lock").write_bytes(content)
        with pytest.raises(LockError, match="Another job writes"):
            lock.check()


def test_a_lock_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "folder", "mine")
    lock.acquire()
    shutil.rmtree(tmp_path / "folder")
    with pytest.raises(FileNotFoundError):
        lock.check()
    (tmp_path / "folder").mkdir()
    lock.check()
    lock.check()
    with pytest.raises(LockError, match=f"pid {os.getpid()}"):
        FolderLock(tmp_path / "folder", "theirs").acquire()
    lock.release()
    with pytest.raises(LockError):
        lock.check()


def test_a_check_ends_with_a_release_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FolderLock(tmp_path, "mine")
    lock.acquire()
    (tmp_path / "lock").unlink()
    exists = lock_module.exists

    def release_first(path: Path) -> bool:
        lock.release()
        return exists(path)

    monkeypatch.setattr(lock_module, "exists", release_first)
    with refused(LockError, str(tmp_path)):
        lock.check()


@pytest.mark.parametrize("is_released", [False, True])
def test_a_job_whose_lock_file_was_removed_and_taken_is_refused(tmp_path: Path, is_released: bool) -> None:
    lock, successor = FolderLock(tmp_path, "mine"), FolderLock(tmp_path, "theirs")
    lock.acquire()
    (tmp_path / "lock").unlink()
    successor.acquire()
    if is_released:
        successor.release()
    for _ in range(2):
        with pytest.raises(LockError):
            lock.check()
    lock.release()
    successor.release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINTR])
def test_a_file_system_without_locks_is_refused_with_its_reason(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(LockError, match=f"{os.strerror(code)}.*errno {code}.*or name another folder"):
        FolderLock(tmp_path, "mine").acquire()
    assert len(os.listdir("/proc/self/fd")) <= len(before)  # those of an earlier test may go meanwhile


def test_a_heartbeat_shows_that_the_holder_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.001)
    others = set(threading.enumerate())
    with FolderLock(tmp_path, "mine"):
        (beat,) = set(threading.enumerate()) - others
        os.utime(tmp_path / "lock", (0, 0))
        deadline = time.monotonic() + JOIN_S
        while not (tmp_path / "lock").stat().st_mtime and time.monotonic() < deadline:
            beat.join(0.002)
        assert (tmp_path / "lock").stat().st_mtime


def test_a_heartbeat_keeps_no_successor_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.001)
    others = set(threading.enumerate())
    lock = FolderLock(tmp_path, "mine")
    lock.acquire()
    leave_record(tmp_path, host="node-7", age_s=STALE_S)  # it has taken the lock over
    (beat,) = set(threading.enumerate()) - others
    for _ in range(20):
        beat.join(0.002)
    with pytest.raises(LockError):
        lock.check()
    assert time.time() - (tmp_path / "lock").stat().st_mtime > STALE_S / 2
    lock.release()
    beat.join(JOIN_S)
    assert not beat.is_alive()
    assert "node-7" in (tmp_path / "lock").read_text()


OF_WRONG_KINDS = '{"host": "x", "pid": 1, "nonce": "n", "started": "then"}'
OF_NO_TIME = OF_WRONG_KINDS.replace('"then"', "1e300")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"host": "x"}', "\xff", OF_WRONG_KINDS, OF_NO_TIME, 60_000 * "["])
def test_a_record_of_nonsense_does_not_keep_a_folder_locked(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text, encoding="latin-1")
    with FolderLock(tmp_path, "mine") as lock:
        lock.check()


def test_the_check_before_a_commit_waits_for_the_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, disk = threading.Event(), threading.Event()

    def sync(descriptor: int) -> None:
        begun.set()
        assert disk.wait(JOIN_S)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(lock_module.os, "fsync", sync)
    lock = FolderLock(tmp_path, "mine")
    lock.acquire()  # returns while the disk is at work
    assert begun.wait(JOIN_S)
    errors: list[object] = []
    checking = threading.Thread(target=lambda: errors.extend(run_ranks(1, lambda _: lock.check())), daemon=True)
    checking.start()
    assert errors == []
    disk.set()
    checking.join(JOIN_S)
    assert "Input/output error" in str(errors)
    lock.release()
