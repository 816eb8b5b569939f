"""One writer per checkpoint folder: an flock, and a file that names its holder, with a heartbeat for other hosts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType

from reprise.atomic import make_folders
from reprise.errors import LockError
from reprise.paths import exists, read_regular
from reprise.storage.files import FILE_SYSTEM, Files, keep_block
from reprise.storage.worker import Job, ending_with

_log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
# A holder on another host that leaves its file untouched while watched for this long is taken for dead.
STALE_S = 120.0
_LOOK_S = 1.0
_RELEASE_S = 5.0  # for a sync that hangs
_DROPPED_S = 120.0  # for the save under way of a dropped saver
_MOST_BYTES = 64 << 10

_dead: dict[str, int] = {}  # by nonce, the last heartbeat of jobs watched in vain: a run has two locks under one nonce

# Of the locks of this process. flock(2) belongs to the open file, which a forked child shares: as long as the child, a
# worker of a DataLoader for one, has it open, the kernel keeps the lock of a parent that has died.
_descriptors: set[int] = set()


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of the lock; `started` is Unix time in seconds."""

    host: str
    pid: int
    nonce: str
    started: float


@dataclass(eq=False, slots=True)
class _Hold:
    """The lock in the hands of its thread, which an interrupt of the main thread leaves alone.

    Args:
        owner: returns None once nothing but a save under way may refer to the lock.
        calls: what the thread does next; None ends it.
        dropped: puts None once nothing refers to the lock.
    """

    path: Path
    me: Holder
    owner: Callable[[], object]
    calls: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)
    descriptor: int | None = None
    dropped: object = None
    thread: threading.Thread = field(init=False)
    is_over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.keep, name="lock-heartbeat", daemon=True)

    def keep(self) -> None:
        """Make calls and keep the heartbeat going until None comes, then release the lock."""
        _holds.add(self)
        while True:
            try:
                job = self.calls.get(timeout=HEARTBEAT_S)
            except Empty:
                if self.is_named():  # else it is somebody else's to keep alive
                    with contextlib.suppress(OSError):
                        os.utime(self.path)
                continue
            if job is None:
                break
            job.run()
            del job  # it refers to the lock, which may be dropped
        if self.descriptor is not None:
            if self.is_named():  # else the name there is somebody else's
                with contextlib.suppress(OSError):
                    os.ftruncate(self.descriptor, 0)
                    keep_block(self.descriptor)
            _close(self.descriptor)
            self.descriptor = None
        _holds.discard(self)
        self.is_over.set()

    def run(self, call: Callable[[], None]) -> None:
        """Let the thread make a call, and raise its exception; no call is made on a thread that has ended."""
        job = Job(call)
        try:
            self.calls.put(job)
            while not job.ends(_LOOK_S) and not self.is_over.is_set():
                continue
            if job.is_done:
                job.wait()
        finally:
            del job  # it has the error, whose traceback refers to this frame

    def is_named(self) -> bool:
        """Return whether the lock file names this lock."""
        holder = _holder(self.path)
        return holder is not None and holder.nonce == self.me.nonce


_holds: set[_Hold] = set()


def _leave_to_parent() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    for hold in _holds:  # its thread is the parent's
        hold.descriptor = None
        hold.is_over.set()
    _holds.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


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

    A thread takes the lock, keeps it and releases it, so that an interrupt of the caller comes before or after each of
    these. An interrupt of `__exit__` itself is met by a second one:

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
        self._is_local = is_local
        self._kind, self._another = kind, another
        self._path = folder.absolute() / name
        self._me = Holder(socket.gethostname(), os.getpid(), nonce, time.time())
        self._owner = weakref.ref(self if owner is None else owner)
        self._hold: _Hold | None = None
        self._shown: Job | None = None
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Take the lock.

        A lock that a job on another host left is watched for `STALE_S` first.

        Another thread syncs the file, for other hosts to read: a crash of this one needs it no more. `check`, which
        comes before every commit, waits for that.

        Raises:
            LockError: if another job holds it, naming its host, pid and start time, or the file system has no locks
                left.
        """
        make_folders(self._files, self._path.parent)
        earlier = [hold for hold in tuple(_holds) if hold.path == self._path]
        try:
            self._acquire()
        except LockError:
            if not _have_ended(earlier):
                raise
            self._acquire()

    def _acquire(self) -> None:
        self._stop.clear()
        hold = self._hold = _Hold(self._path, self._me, self._owner)
        hold.dropped = ending_with(self, hold.calls)
        taken, self._shown = Job(partial(self._take, hold)), Job(partial(self._show, hold))
        try:
            hold.thread.start()
            hold.calls.put(taken)
            hold.calls.put(self._shown)
            taken.wait()
        except BaseException:
            self.release()
            raise
        finally:
            del taken  # it has the error, whose traceback refers to this frame

    def __enter__(self) -> FolderLock:
        """Take the lock, unless it is held, and return it."""
        if self._hold is None:
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
        hold = self._hold
        if hold is not None and hold.descriptor is not None and self._shown is not None:
            self._shown.wait()
            if not exists(self._path):
                hold.run(partial(self._take_again, hold))
        holder = _holder(self._path)
        if hold is None or hold.descriptor is None or holder is None or holder.nonce != self._me.nonce:
            raise self._refusal(holder)

    def refuse_if_taken(self) -> None:
        """Raise if the lock file is readable and not ours; an unreadable one proves nothing.

        Raises:
            LockError: if another job took it over, even if it has released it since.
        """
        try:
            read_regular(self._path, limit_bytes=_MOST_BYTES)
        except OSError as error:
            if error.errno != errno.EFBIG:  # a file of that size is a lock of nobody
                return
        holder = _holder(self._path)
        if holder is None or holder.nonce != self._me.nonce:
            raise self._refusal(holder)

    def release(self) -> None:
        """Release the lock; calling it again is fine."""
        self._stop.set()
        if self._hold is not None:
            self._hold.calls.put(None)
            # One that never began, for want of threads, holds nothing; one that hangs holds it until the process ends.
            if self._hold.thread.ident is None or self._hold.is_over.wait(_RELEASE_S):
                self._hold = None

    def _take(self, hold: _Hold) -> None:
        """Open the lock file, creating it if missing, and take the lock."""
        descriptor = self._open()
        try:
            self._lock(descriptor)
            holder = _holder(self._path)
            if holder is not None and holder.host != self._me.host and not self._is_local:
                self._watch(holder)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(self._me)).encode(), 0)
        except (OSError, LockError):
            _close(descriptor)
            raise
        hold.descriptor = descriptor

    def _take_again(self, hold: _Hold) -> None:
        """Make a lost lock file again, and take and sync it."""
        lost = hold.descriptor
        self._take(hold)
        if lost is not None:
            _close(lost)
        self._show(hold)

    @staticmethod
    def _show(hold: _Hold) -> None:
        """Sync a lock file that was taken."""
        if hold.descriptor is not None:
            os.fsync(hold.descriptor)

    def _open(self) -> int:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder, a socket
                raise self._no_file() from error
            raise
        _descriptors.add(descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            _close(descriptor)
            raise self._no_file()
        return descriptor

    def _watch(self, holder: Holder) -> None:
        """Return once a holder on another host, where flock may not reach, has released the lock or is dead.

        Only a change of its heartbeat tells: clocks differ between hosts. Looks count, not time, during which this
        process or the file system may have stood still.
        """
        seen = self._heartbeat()
        if seen < _dead.get(holder.nonce, 0) + 2e9 * HEARTBEAT_S:
            return
        _log.warning(
            f"{self._path} names a job on host {holder.host}, pid {holder.pid}: waiting for it to end, at most "
            f"{STALE_S:.0f} s without a sign of life"
        )
        for _ in range(round(STALE_S / _LOOK_S)):
            is_stopped = self._stop.wait(_LOOK_S)
            if not is_locked(self._path.parent, self._path.name):
                return
            if is_stopped or _holder(self._path) != holder or self._heartbeat() != seen:
                raise self._refusal(_holder(self._path))
        _dead[holder.nonce] = seen

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(_holder(self._path)) from None
        except OSError as error:
            raise LockError(
                f"The lock of a {self._kind} cannot be taken: {error.strerror} (errno {error.errno})",
                where=self._path,
                fix=f"Let the file system carry flock(2), or name {self._another}.",
            ) from error

    def _heartbeat(self) -> int:
        return self._path.stat().st_mtime_ns

    def _refusal(self, holder: Holder | None) -> LockError:
        what, owner = f"Another job writes to this {self._kind}", "a holder that left no name"
        fix = f"End that job, or give this one {self._another}."
        if holder is not None:
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
            owner = f"host {holder.host}, pid {holder.pid}, started {started}"
        if holder is not None and holder.nonce in {hold.me.nonce for hold in tuple(_holds)} - {self._me.nonce}:
            what = f"This process writes to this {self._kind} already"
            fix = (
                "Call `close` on the AsyncSaver that has it, which lives as long as a variable or the traceback of an "
                f"error refers to it, wait for the call on another thread that has it, or name {self._another}."
            )
        elif holder is not None and holder.host == self._me.host and not _is_alive(holder.pid):
            owner += "; that process is gone, and a child of it has the lock open"
            fix = f"End that child, which `fuser {self._path}` names, or give this job {self._another}."
        return LockError(what, where=self._path.parent, found=owner, fix=fix)

    def _no_file(self) -> LockError:
        return LockError(
            f"The lock of a {self._kind} is no regular file",
            where=self._path,
            fix=f"Remove it, or name {self._another}.",
        )


def _holder(path: Path) -> Holder | None:
    """Return the holder that a lock file names, or None."""
    try:
        holder = Holder(**json.loads(read_regular(path, limit_bytes=_MOST_BYTES)))
        time.localtime(holder.started)
    except (OSError, OverflowError, RecursionError, ValueError, TypeError):
        return None
    return holder


def _have_ended(holds: list[_Hold]) -> bool:
    """Wait for the dropped ones of this process's locks; return whether there were any, and all have ended."""
    if holds:
        gc.collect()
    dropped = [hold for hold in holds if hold.owner() is None]
    return bool(dropped) and all(hold.is_over.wait(_DROPPED_S) for hold in dropped)


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _is_alive(pid: int) -> bool:
    """Return whether a process of this host exists; one in another PID namespace does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
