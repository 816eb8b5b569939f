"""A single writer per checkpoint folder: an flock, and a file naming its holder, with a heartbeat for other hosts."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import time
import weakref
from pathlib import Path
from types import TracebackType

from reprise.errors import LockError
from reprise.storage import lease
from reprise.storage.atomic import make_folders
from reprise.storage.files import FILE_SYSTEM, keep_block
from reprise.storage.lease import Holder, Lease, leases
from reprise.storage.paths import exists
from reprise.storage.worker import Job, ending_with

_log = logging.getLogger(__name__)

LOCK = "lock"  # the file's name in a checkpoint folder
# A holder on another host counts as dead if its file stays untouched while watched for this long.
STALE_S = 120.0
_POLL_S = 1.0
_DROPPED_S = 120.0  # limits the wait for a dropped saver's save

_dead_heartbeats: dict[str, int] = {}  # dead jobs' last heartbeats, by nonce: a run's two locks share a nonce


def is_locked(folder: Path, name: str = LOCK) -> bool:
    """Return whether a job holds a folder's lock, or died holding it. A job ending normally empties the file.

    True if the file cannot be read now.
    """
    try:
        return (folder / name).stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


class FolderLock:
    """A folder's lock, held from `acquire` to `release`, or until nothing refers to it.

    Between processes on the same host, flock(2) alone decides: the kernel releases it when the holder dies. Between
    hosts whose file system does not propagate flock, the holder's heartbeat decides: the file's modification time
    changes, whatever clocks show.

    An interrupt in the caller leaves the lock either taken or free, and free once the program drops it. If an interrupt
    may hit `__exit__` itself, enter the lock twice:

        with lock, lock:
            ...

    Args:
        kind: The folder kind, for messages.
        another: What the user should name to use another folder, for messages.
        is_local: Whether the folder belongs to this host alone, even if the host was renamed. Then flock alone decides.
        name: The lock file's name.
        owner: The object using the lock. Once it is dropped, another `acquire` in this process waits until the save
            under way releases the lock. By default the lock itself.
    """

    def __init__(
        self,
        folder: Path,
        nonce: str,
        *,
        kind: str = "checkpoint folder",
        another: str = "another folder",
        is_local: bool = False,
        name: str = LOCK,
        owner: object = None,
    ) -> None:
        self._file = file = _LockFile(folder.absolute() / name, nonce)
        file.kind, file.another, file.is_local = kind, another, is_local
        file.owner = weakref.ref(self if owner is None else owner)
        file.dropped = ending_with(self, file.calls)

    def acquire(self) -> None:
        """Take the lock, unless already held. Not after `release`.

        A lock left by a job on another host is first watched for `STALE_S`. The file is synced in the background;
        `check`, called before every commit, waits for the sync.

        Raises:
            LockError: Another job holds it (the message names its host, pid and start time), or the file system refuses
                flock.
        """
        if self._file.descriptor < 0:
            make_folders(FILE_SYSTEM, self._file.path.parent)
            self._file.await_dropped()
            self._file.begin(self._file.take)

    def __enter__(self) -> FolderLock:
        """Take the lock, unless already held, and return it."""
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        self.release()

    def check(self) -> None:
        """Raise if this job no longer holds the lock.

        A missing lock file is created again: nobody took over, since a job taking over leaves a file.

        Raises:
            LockError: Another job took it over.
            OSError: The folder does not exist, or the file cannot be synced.
        """
        file = self._file
        if file.descriptor >= 0:
            if not exists(file.path):
                file.run(file.take)
            file.await_job(file.synced)
        with contextlib.suppress(OSError):
            if file.descriptor >= 0 and file.is_mine():
                return
        raise file.refusal()

    def refuse_if_taken(self) -> None:
        """Raise if the lock file is readable and not ours. An unreadable file proves nothing.

        Raises:
            LockError: Another job took it over, even if it has released it since.
        """
        with contextlib.suppress(OSError):
            if not self._file.is_mine():
                raise self._file.refusal()

    def release(self) -> None:
        """Release the lock. Repeated calls do nothing."""
        self._file.release()


class _LockFile(Lease):
    """A lock's file and its thread's calls. It holds no reference to the lock, whose garbage collection ends it.

    Attributes:
        owner: The object using the lock.
        dropped: Ends the lease once nothing refers to the lock. Kept here, since it must outlive the lock.
        synced: The job syncing the file for other hosts to read.
        kind, another, is_local: See `FolderLock`.
    """

    owner: weakref.ref[object]
    dropped: weakref.ref[FolderLock]
    synced: Job
    kind: str
    another: str
    is_local: bool

    def take(self) -> None:
        """Open the lock file, creating it if missing, and take the lock."""
        earlier = self.descriptor
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if earlier >= 0:
            os.close(earlier)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self.refusal() from None
        except OSError as error:
            raise LockError(
                f"The lock of a {self.kind} cannot be taken: {error.strerror} (errno {error.errno})",
                where=self.path,
                fix=f"Mount the file system with flock(2) support, or name {self.another}.",
            ) from error
        holder = self._holder()
        if holder is not None and holder.host != self.me.host and not self.is_local:
            self._watch(holder)
        os.ftruncate(self.descriptor, 0)
        self.write_record()
        self.synced = Job(lambda: os.fsync(self.descriptor))
        self.calls.put(self.synced)

    def _watch(self, holder: Holder) -> None:
        """Wait until a holder on another host, where flock may not reach, has released the lock or is dead.

        Only a changing heartbeat proves it alive, since clocks differ between hosts. Checks are counted, not time,
        since this process or the file system may have been suspended.

        Raises:
            LockError: The holder is alive, or another job took the lock.
        """
        seen = self.path.stat().st_mtime_ns
        if seen < _dead_heartbeats.get(holder.nonce, 0) + 2e9 * lease.HEARTBEAT_S:
            return
        _log.warning(
            f"{self.path} names a job on host {holder.host}, pid {holder.pid}: waiting for it to end, at most "
            f"{STALE_S:.0f} s without a sign of life"
        )
        for _ in range(round(STALE_S / _POLL_S)):
            time.sleep(_POLL_S)
            if not is_locked(self.path.parent, self.path.name):
                return
            if self._holder() != holder or self.path.stat().st_mtime_ns != seen:
                raise self.refusal()
        _dead_heartbeats[holder.nonce] = seen

    def is_mine(self) -> bool:
        """Return whether the file names this lock.

        Raises:
            OSError: The file cannot be read.
        """
        holder = Holder.of(self.path)
        return holder is not None and holder.nonce == self.me.nonce

    def beat(self) -> None:
        if self.is_mine():
            os.utime(self.path)

    def give_up(self) -> None:
        if self.is_mine():
            os.ftruncate(self.descriptor, 0)
            keep_block(self.descriptor)

    def await_dropped(self) -> None:
        """Wait for this process's locks whose owners were dropped, which a save under way may still hold."""
        earlier = [file for file in tuple(leases) if isinstance(file, _LockFile) and file.path == self.path]
        if earlier:
            gc.collect()
        for file in earlier:
            if file.owner() is None:
                file.is_over.wait(_DROPPED_S)

    def refusal(self) -> LockError:
        """Return the error naming the lock's holder."""
        holder = self._holder()
        what, name = f"Another job writes to this {self.kind}", "a holder that left no name"
        fix = f"End that job, or give this one {self.another}."
        if holder is not None:
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
            name = f"host {holder.host}, pid {holder.pid}, started {started}"
            if any(file.path == self.path and file is not self for file in tuple(leases)):
                what = f"This process writes to this {self.kind} already"
                fix = (
                    "Call `close` on the AsyncSaver using it, which lives as long as a variable or an error's "
                    f"traceback refers to it. Or wait for another thread's call using it, or name {self.another}."
                )
        return LockError(what, where=self.path.parent, found=name, fix=fix)

    def _holder(self) -> Holder | None:
        with contextlib.suppress(OSError):
            return Holder.of(self.path)
        return None
