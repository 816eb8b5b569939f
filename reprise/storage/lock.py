"""A single writer per checkpoint folder: an flock, and a file naming its holder, with a heartbeat for other hosts."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import time
import weakref
from functools import partial
from pathlib import Path

from reprise.errors import LockError
from reprise.storage.atomic import make_folders
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.lease import HEARTBEAT_S, Holder, Lease, leases
from reprise.storage.paths import exists

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
        another: str = "another folder",
        is_local: bool = False,
        name: str = LOCK,
        owner: object = None,
    ) -> None:
        self._another, self._is_local = another, is_local
        self._lease = lease = Lease(folder.absolute() / name, nonce)
        lease.owner = weakref.ref(owner or self)
        lease.dropped = weakref.ref(self, partial(lease.calls.put, None))  # see `Worker`

    def acquire(self) -> FolderLock:
        """Take the lock, unless already held, and return it. Not after `release`.

        A lock left by a job on another host is first watched for `STALE_S`. The file is synced in the background;
        `check`, called before every commit, waits for the sync.

        Raises:
            LockError: Another job holds it (the message names its host, pid and start time), or the file system refuses
                flock.
        """
        if self._lease.descriptor < 0:
            make_folders(FILE_SYSTEM, self._lease.path.parent)
            self._await_dropped()
            self._lease.begin(self._take)
        return self

    __enter__ = acquire

    def check(self) -> None:
        """Raise if this job no longer holds the lock.

        A missing lock file is created again: nobody took over, since a job taking over leaves a file.

        Raises:
            LockError: Another job took it over, even if it has released it since.
            OSError: The folder does not exist, or the file cannot be read or synced, which proves nothing.
        """
        lease = self._lease
        is_missing = not exists(lease.path)
        if lease.descriptor >= 0:
            if is_missing:
                self._take()
            lease.sync()
            if lease.is_mine():
                return
        raise self._refusal()

    def release(self, *_error: object) -> None:
        """Release the lock. Repeated calls do nothing."""
        self._lease.release()

    __exit__ = release

    def _take(self) -> None:
        """Open the lock file, creating it if missing, and take the lock."""
        lease, earlier = self._lease, self._lease.descriptor
        lease.descriptor = os.open(lease.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        if earlier >= 0:
            os.close(earlier)
        try:
            fcntl.flock(lease.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal() from None
        except OSError as error:
            raise LockError(
                f"A folder's lock cannot be taken: {error.strerror} (errno {error.errno})",
                where=lease.path,
                fix=f"Mount the file system with flock(2) support, or name {self._another}.",
            ) from error
        holder = Holder.of(lease.path)
        if holder is not None and holder.host != lease.me.host and not self._is_local:
            self._watch(holder)
        os.ftruncate(lease.descriptor, 0)
        lease.write_record()
        lease.is_synced = False
        lease.calls.put(lease.sync)

    def _watch(self, holder: Holder) -> None:
        """Wait until a holder on another host, where flock may not reach, has released the lock or is dead.

        Only a changing heartbeat proves it alive, since clocks differ between hosts. Checks are counted, not time,
        since this process or the file system may have been suspended.

        Raises:
            LockError: The holder is alive, or another job took the lock.
        """
        path = self._lease.path
        seen = path.stat().st_mtime_ns
        if seen < _dead_heartbeats.get(holder.nonce, 0) + 2e9 * HEARTBEAT_S:
            return
        _log.warning(
            f"{path} names a job on host {holder.host}, pid {holder.pid}: waiting for it to end, at most "
            f"{STALE_S:.0f} s without a sign of life"
        )
        for _ in range(round(STALE_S / _POLL_S)):
            time.sleep(_POLL_S)
            if not is_locked(path.parent, path.name):
                return
            if Holder.of(path) != holder or path.stat().st_mtime_ns != seen:
                raise self._refusal()
        _dead_heartbeats[holder.nonce] = seen

    def _await_dropped(self) -> None:
        """Wait for this process's locks whose owners were dropped, which a save under way may still hold."""
        for lease in tuple(leases):
            if lease.path == self._lease.path:
                gc.collect()
                if lease.owner() is None:
                    lease.is_over.wait(_DROPPED_S)

    def _refusal(self) -> LockError:
        """Return the error naming the lock's holder."""
        holder, path = None, self._lease.path
        with contextlib.suppress(OSError):
            holder = Holder.of(path)
        what, name = "Another job writes to this folder", "a holder that left no name"
        fix = f"End that job, or give this one {self._another}."
        if holder is not None:
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
            name = f"host {holder.host}, pid {holder.pid}, started {started}"
            if any(lease.path == path and lease is not self._lease for lease in tuple(leases)):
                what = "This process writes to this folder already"
                fix = (
                    "Call `close` on the AsyncSaver using it, which lives as long as a variable or an error's "
                    f"traceback refers to it. Or wait for another thread's call using it, or name {self._another}."
                )
        return LockError(what, where=path.parent, found=name, fix=fix)
