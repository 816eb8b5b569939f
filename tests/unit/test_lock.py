"""One writer per folder, whatever becomes of the last one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.checkpoint.lock import STALE_S, FolderLock
from trainer.errors import LockError

HOLDER = """
import sys
from pathlib import Path
from trainer.checkpoint.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "theirs")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


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
    first.release()
    first.release()


def test_a_released_lock_is_free(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path, "a"), FolderLock(tmp_path, "b")
    first.acquire()
    first.release()
    second.acquire()
    second.check()
    with pytest.raises(LockError):
        first.check()
    second.release()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = FolderLock(tmp_path, "mine")
        with pytest.raises(LockError, match=f"pid {holder.pid}"):
            lock.acquire()
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        lock.acquire()
        lock.check()
        lock.release()
    finally:
        holder.kill()
        holder.communicate()


def test_a_living_holder_on_another_host_is_respected(tmp_path: Path) -> None:
    leave_record(tmp_path, host="node-7", age_s=STALE_S / 2)
    with pytest.raises(LockError, match="host node-7, pid 4711"):
        FolderLock(tmp_path, "mine").acquire()
    assert "node-7" in (tmp_path / "lock").read_text()


def test_a_holder_on_another_host_that_fell_silent_is_taken_for_dead(tmp_path: Path) -> None:
    leave_record(tmp_path, host="node-7", age_s=STALE_S + 60)
    lock = FolderLock(tmp_path, "mine")
    lock.acquire()
    lock.check()
    lock.release()


def test_a_lock_that_was_taken_over_is_noticed_and_left_alone(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "mine")
    lock.acquire()
    leave_record(tmp_path, host="node-7", age_s=0)
    with pytest.raises(LockError, match="node-7"):
        lock.check()
    lock.release()
    assert "node-7" in (tmp_path / "lock").read_text()


def test_a_lock_file_that_was_removed_is_noticed(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "mine")
    lock.acquire()
    (tmp_path / "lock").unlink()
    with pytest.raises(LockError):
        lock.check()
    lock.release()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"host": "x"}', "\xff"])
def test_a_record_of_nonsense_does_not_keep_a_folder_locked(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text, encoding="latin-1")
    lock = FolderLock(tmp_path, "mine")
    lock.acquire()
    lock.check()
    lock.release()
