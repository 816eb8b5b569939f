"""One writer per checkpoint folder: an flock, and a file that names its holder, with a heartbeat for other hosts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from reprise.atomic import make_folders
from reprise.errors import LockError
from reprise.paths import exists, read_regular
from reprise.storage.files import FILE_SYSTEM, Files, keep_block

_log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
# A holder on another host that has not been heard of for this long is taken for dead.
STALE_S = 120.0
_LOOK_S = 1.0
_RELEASE_S = 5.0  # for a sync that hangs
_MOST_BYTES = 64 << 10

# Of the locks of this process. flock(2) belongs to the open file, which a forked child shares: as long as the child, a
# worker of a DataLoader for one, has it open, the kernel keeps the lock of a parent that has died.
_descriptors: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of the lock; `started` is Unix time in seconds."""

    host: str
    pid: int
    nonce: str
    started: float


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
    """The lock of one folder, held from `acquire` to `release` or to the end of the process.

    Between processes of one host, flock(2) alone decides: the kernel releases it when the holder dies. Between hosts
    whose file system does not propagate flock, the holder's heartbeat (the file's modification time) decides.

    Args:
        kind: the kind of folder, for messages.
        another: what to give for another folder, for messages.
        is_local: whether the folder is this host's own, whatever the host was called before: flock alone decides.
        name: the name of the lock file.
    """

    def __init__(
        self,
        folder: Path,
        nonce: str,
        *,
        clock: Callable[[], float] = time.time,
        kind: str = "checkpoint folder",
        another: str = "another folder",
        is_local: bool = False,
        files: Files = FILE_SYSTEM,
        name: str = "lock",
    ) -> None:
        self._files = files
        self._is_local = is_local
        self._kind, self._another = kind, another
        self._path = folder / name
        self._me = Holder(socket.gethostname(), os.getpid(), nonce, clock())
        self._clock = clock
        self._descriptor: int | None = None
        self._stop = threading.Event()
        self._shown = threading.Event()
        self._showing_error: OSError | None = None

    def acquire(self) -> None:
        """Take the lock.

        Another thread syncs the file, for other hosts to read: a crash of this one needs it no more. `check`, which
        comes before every commit, waits for that.

        Raises:
            LockError: if another job holds it, naming its host, pid and start time, or the file system has no locks
                left.
        """
        make_folders(self._files, self._path.parent)
        self._descriptor = self._take()
        beat = partial(self._beat, self._descriptor)
        threading.Thread(target=beat, name="lock-heartbeat", daemon=True).start()

    def check(self) -> None:
        """Raise if the lock is no longer ours.

        A missing lock file, with or without its folder, is made again: a job that takes over leaves one.

        Raises:
            LockError: if another job took it over.
            OSError: if the folder does not exist, or the file cannot be synced.
        """
        if self._descriptor is not None:
            self._shown.wait()
        if self._showing_error is not None:
            raise self._showing_error
        if self._descriptor is not None and not exists(self._path):
            lost, self._descriptor = self._descriptor, self._take()
            _close(lost)
            os.fsync(self._descriptor)
        holder = self._holder()
        if self._descriptor is None or holder is None or holder.nonce != self._me.nonce:
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
        holder = self._holder()
        if holder is None or holder.nonce != self._me.nonce:
            raise self._refusal(holder)

    def release(self) -> None:
        """Release the lock; calling it again is fine."""
        self._stop.set()
        if self._descriptor is not None and self._shown.wait(_RELEASE_S):  # else the end of the process releases it
            holder = self._holder()
            if holder is not None and holder.nonce == self._me.nonce:  # else the name there is somebody else's
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
                    keep_block(self._descriptor)
            _close(self._descriptor)
            self._descriptor = None

    def _take(self) -> int:
        """Open the lock file, creating it if missing, take the lock and return the descriptor."""
        descriptor = self._open()
        try:
            self._lock(descriptor)
            holder = self._holder()
            if holder is not None and holder.host != self._me.host and not self._is_local:
                self._refuse_if_alive(holder)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(self._me)).encode(), 0)
        except (OSError, LockError):
            _close(descriptor)
            raise
        return descriptor

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

    def _refuse_if_alive(self, holder: Holder) -> None:
        """Raise unless a holder on another host, where flock may not reach, is dead by its heartbeat.

        The age of a heartbeat in the future proves nothing; it is observed for a change instead.
        """
        seen = self._heartbeat()
        age_s = self._clock() - seen
        if 0 <= age_s < STALE_S:
            raise self._refusal(holder)
        if age_s >= STALE_S:
            return
        _log.warning(
            f"{self._path} has a time {-age_s:.0f} s in the future, set by host {holder.host}: compare the clocks. "
            f"Watching for {STALE_S:.0f} s whether that host sets it again"
        )
        deadline = time.monotonic() + STALE_S
        while time.monotonic() < deadline:
            self._stop.wait(min(_LOOK_S, HEARTBEAT_S))
            if self._heartbeat() != seen:
                raise self._refusal(holder)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(self._holder()) from None
        except OSError as error:
            raise LockError(
                f"The lock of a {self._kind} cannot be taken: {error.strerror} (errno {error.errno})",
                where=self._path,
                fix=f"Let the file system carry flock(2), or name {self._another}.",
            ) from error

    def _beat(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            self._showing_error = error
        finally:
            self._shown.set()
        while not self._stop.wait(HEARTBEAT_S):
            holder = self._holder()
            if holder is not None and holder.nonce == self._me.nonce:  # else it is somebody else's to keep alive
                with contextlib.suppress(OSError):
                    os.utime(self._path)

    def _heartbeat(self) -> float:
        return self._path.stat().st_mtime

    def _holder(self) -> Holder | None:
        try:
            holder = Holder(**json.loads(read_regular(self._path, limit_bytes=_MOST_BYTES)))
            time.localtime(holder.started)
        except (OSError, OverflowError, RecursionError, ValueError, TypeError):
            return None
        return holder

    def _refusal(self, holder: Holder | None) -> LockError:
        owner = "a holder that left no name"
        fix = f"End that job, or give this one {self._another}."
        if holder is not None:
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
            owner = f"host {holder.host}, pid {holder.pid}, started {started}"
        if holder is not None and holder.host == self._me.host and not _is_alive(holder.pid):
            owner += "; that process is gone, and a child of it has the lock open"
            fix = f"End that child, which `fuser {self._path}` names, or give this job {self._another}."
        if holder is not None and holder.host != self._me.host:  # it may have died with its host
            age_s = max(0.0, self._clock() - self._heartbeat())
            owner += f", last heard of {age_s:.0f} s ago"
            fix = (
                f"If that job runs, end it, or give this one {self._another}. If it is dead, start "
                f"this one again in {max(1.0, STALE_S - age_s):.0f} s, or remove {self._path}."
            )
        return LockError(f"Another job writes to this {self._kind}", where=self._path.parent, found=owner, fix=fix)

    def _no_file(self) -> LockError:
        return LockError(
            f"The lock of a {self._kind} is no regular file",
            where=self._path,
            fix=f"Remove it, or name {self._another}.",
        )


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
