"""Two hosts whose clocks differ, or are set: one writer, and nothing deleted that is held."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from reprise import prune
from reprise.errors import LockError
from reprise.storage import holds, lease, lock
from reprise.storage.folder import iteration_name
from reprise.storage.holds import Hold
from reprise.storage.lock import FolderLock
from tests.crash.hosts import enter_host, require_mounts
from tests.fakes import JOIN_S
from tests.unit.reprise.management.test_listing import save

DAY_S = 86400.0
CLOCKS = [-DAY_S, -300.0, 300.0, 900.0, DAY_S]


def host(name: str, work: str, folder: Path, orders: Connection) -> None:
    """Live on a host whose file system carries no flock to others."""
    enter_host(name)
    real, ahead_s = time.time, 0.0
    time.time = lambda: real() + ahead_s  # type: ignore[assignment]
    fcntl.flock = lambda descriptor, operation: None  # type: ignore[assignment]
    lease.HEARTBEAT_S, lock._POLL_S, lock.STALE_S = 0.01, 0.05, 600.0
    if work == "hold":
        mine, hold = FolderLock(folder / "locked", name), Hold.take(folder / "checkpoints" / iteration_name(1))
        mine.acquire()
        assert hold is not None
        while True:
            orders.send(True)
            ahead_s = orders.recv()
            mine.check()
    while True:
        ahead_s, is_dead = orders.recv()
        lock.STALE_S = 0.2 if is_dead else 600.0
        mine = FolderLock(folder / "locked", name)
        try:
            mine.acquire()
            is_refused = False
            mine.release()
        except LockError:
            is_refused = True
        orders.send((is_refused, prune(folder / "checkpoints", keep=1).retained))


@contextmanager
def living(name: str, work: str, folder: Path) -> Iterator[tuple[int, Connection]]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=host, args=(name, work, folder, theirs))
    process.start()
    theirs.close()
    try:
        yield process.pid or 0, ours
    finally:
        process.kill()
        process.join(JOIN_S)


def test_hosts_of_other_clocks_have_one_writer_and_keep_holds(tmp_path: Path) -> None:
    require_mounts()
    save(tmp_path / "checkpoints", 1, 2)
    (tmp_path / "locked").mkdir()
    with living("host0", "hold", tmp_path) as (pid, holder), living("host1", "contend", tmp_path) as (_, contender):
        assert holder.recv()
        for ahead_s in CLOCKS:
            contender.send((ahead_s, False))
            assert contender.recv() == (True, (1, 2)), ahead_s
            holder.send(-ahead_s)  # its clock is set, and it still has the lock
            assert holder.recv()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        contender.send((-DAY_S, True))
        assert contender.recv() == (False, (1, 2))
        path = tmp_path / "checkpoints" / iteration_name(1)
        (hold,) = path.glob(f"{holds.HOLD}.*")
        os.utime(hold, (hold.stat().st_mtime - holds.EXPIRY_S,) * 2)
        contender.send((-DAY_S, True))
        assert contender.recv() == (False, (2,))
