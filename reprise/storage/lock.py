"""One writer per checkpoint folder: an flock, and a file that names its holder, with a heartbeat for other hosts."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from reprise.errors import LockError
from reprise.storage import lease
from reprise.storage.atomic import make_folders
from reprise.storage.files import FILE_SYSTEM, Files, keep_block
from reprise.storage.lease import Lease, leases, record_in
from reprise.storage.paths import exists
from reprise.storage.worker import Job

_log = logging.getLogger(__name__)

# A holder on another host that leaves its file untouched while watched for this long is taken for dead.
STALE_S = 120.0
_LOOK_S = 1.0
_DROPPED_S = 120.0  # for the save under way of a dropped saver

_dead: dict[str, int] = {}  # by nonce, the last heartbeat of jobs watched in vain: a run has two locks under one nonce


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of the lock; `started` is Unix time in seconds."""

    host: str
    pid: int
    nonce: str
    started: float

    def __post_init__(self) -> None:
        time.localtime(self.started)  # raises if it cannot be one


def is_locked(folder: Path, name: str = "lock") -> bool:
    """Return whether a job has the lock of a folder, or has died with it: a job that ends leaves the file empty.

    True where the file cannot be looked at now.
    """
    try:
        return (folder / name).stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


class FolderLock:
    """The lock of one folder, held from `acquire` to `release`, or until nothing refers to it any more.

    Between processes of one host, flock(2) alone decides: the kernel releases it when the holder dies. Between hosts
    whose file system does not propagate flock, the holder's heartbeat decides: a change of the file's modification
    time, whatever clocks show.

    An interrupt of the caller leaves the lock taken or free, and one of a program that drops it free. An interrupt of
    `__exit__` itself is met by a second one:

        with lock, lock:
            ...

    Args:
        kind: the kind of folder, for messages.
        another: what to give for another folder, for messages.
        is_local: whether the folder is this host's own, whatever the host was called before: flock alone decides.
        name: the name of the lock file.
        owner: whoever the lock is for, if a save under way refers to the lock longer; the lock itself by default.
    """

    def __init__(
        self,
        folder: Path,
        nonce: str,
        *,
        kind: str = "checkpoint folder",
        another: str = "another folder",
        is_local: bool = False,
        files: Files = FILE_SYSTEM,
        name: str = "lock",
        owner: object = None,
    ) -> None:
        self._files = files
        self._kind, self._another, self._is_local = kind, another, is_local
        self._path = path = folder.absolute() / name
        self._me = Holder(socket.gethostname(), os.getpid(), nonce, time.time())
        self._lease = Lease(
            path,
            self,
            owner=owner,
            touch=partial(_touch, path, nonce),
            give_up=partial(_give_up, path, nonce),
        )
        self._synced = Job(self._sync)

    def acquire(self) -> None:
        """Take the lock; called once.

        A lock that a job on another host left is watched for `STALE_S` first. `check`, which comes before every commit,
        waits for the sync of the file.

        Raises:
            LockError: if another job holds it, naming its host, pid and start time, or the file system has no locks
                left.
        """
        make_folders(self._files, self._path.parent)
        _await_dropped(self._path)
        self._lease.begin(self._take)
        self._lease.calls.put(self._synced)

    def __enter__(self) -> FolderLock:
        """Take the lock, unless it is held, and return it."""
        if self._lease.descriptor < 0:
            self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        self.release()

    def check(self) -> None:
        """Raise if the lock is no longer ours.

        A missing lock file, with or without its folder, is made again: a job that takes over leaves one.

        Raises:
            LockError: if another job took it over.
            OSError: if the folder does not exist, or the file cannot be synced.
        """
        if self._lease.descriptor >= 0:
            self._synced.wait()
            if not exists(self._path):
                self._lease.run(self._take)
                self._lease.run(self._sync)
        if self._lease.descriptor < 0 or not _is_named(self._path, self._me.nonce):
            raise self._refusal()

    def refuse_if_taken(self) -> None:
        """Raise if the lock file is readable and not ours; an unreadable one proves nothing.

        Raises:
            LockError: if another job took it over, even if it has released it since.
        """
        with contextlib.suppress(OSError):
            holder = record_in(self._path, Holder)
            if holder is None or holder.nonce != self._me.nonce:
                raise self._refusal()

    def release(self) -> None:
        """Release the lock; calling it again is fine."""
        self._lease.release()

    def _take(self) -> None:
        """Open the lock file, creating it if missing, and take the lock."""
        earlier = self._lease.descriptor
        self._lease.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if earlier >= 0:
            os.close(earlier)
        try:
            fcntl.flock(self._lease.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal() from None
        except OSError as error:
            raise LockError(
                f"The lock of a {self._kind} cannot be taken: {error.strerror} (errno {error.errno})",
                where=self._path,
                fix=f"Let the file system carry flock(2), or name {self._another}.",
            ) from error
        holder = _holder(self._path)
        if holder is not None and holder.host != self._me.host and not self._is_local:
            self._watch(holder)
        os.ftruncate(self._lease.descriptor, 0)
        os.pwrite(self._lease.descriptor, json.dumps(asdict(self._me)).encode(), 0)

    def _sync(self) -> None:
        """Sync the file, for other hosts to read: a crash of this one needs it no more."""
        os.fsync(self._lease.descriptor)

    def _watch(self, holder: Holder) -> None:
        """Return once a holder on another host, where flock may not reach, has released the lock or is dead.

        Only a change of its heartbeat tells: clocks differ between hosts. Looks count, not time, during which this
        process or the file system may have stood still.
        """
        seen = self._path.stat().st_mtime_ns
        if seen < _dead.get(holder.nonce, 0) + 2e9 * lease.HEARTBEAT_S:
            return
        _log.warning(
            f"{self._path} names a job on host {holder.host}, pid {holder.pid}: waiting for it to end, at most "
            f"{STALE_S:.0f} s without a sign of life"
        )
        for _ in range(round(STALE_S / _LOOK_S)):
            time.sleep(_LOOK_S)
            if not is_locked(self._path.parent, self._path.name):
                return
            if _holder(self._path) != holder or self._path.stat().st_mtime_ns != seen:
                raise self._refusal()
        _dead[holder.nonce] = seen

    def _refusal(self) -> LockError:
        holder = _holder(self._path)
        what, name = f"Another job writes to this {self._kind}", "a holder that left no name"
        fix = f"End that job, or give this one {self._another}."
        if holder is not None:
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
            name = f"host {holder.host}, pid {holder.pid}, started {started}"
            if any(other.path == self._path and other is not self._lease for other in tuple(leases)):
                what = f"This process writes to this {self._kind} already"
                fix = (
                    "Call `close` on the AsyncSaver that has it, which lives as long as a variable or the traceback of "
                    f"an error refers to it, wait for the call on another thread that has it, or name {self._another}."
                )
        return LockError(what, where=self._path.parent, found=name, fix=fix)


def _holder(path: Path) -> Holder | None:
    """Return the holder that a lock file names, or None."""
    with contextlib.suppress(OSError):
        return record_in(path, Holder)
    return None


def _is_named(path: Path, nonce: str) -> bool:
    """Return whether a lock file names the lock of a nonce; else it is somebody else's."""
    holder = _holder(path)
    return holder is not None and holder.nonce == nonce


def _touch(path: Path, nonce: str) -> None:
    if _is_named(path, nonce):
        os.utime(path)


def _give_up(path: Path, nonce: str, descriptor: int) -> None:
    if _is_named(path, nonce):
        os.ftruncate(descriptor, 0)
        keep_block(descriptor)


def _await_dropped(path: Path) -> None:
    """Wait for the locks of this process whose owners are dropped: a save under way keeps them."""
    earlier = [other for other in tuple(leases) if other.path == path]
    if earlier:
        gc.collect()
    for other in earlier:
        if other.owner() is None:
            other.is_over.wait(_DROPPED_S)
