"""One writer per checkpoint folder: an flock, and a record of its holder with a heartbeat for other hosts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import LockError

HEARTBEAT_S = 15.0
# A holder on another host that has not been heard of for this long is taken for dead.
STALE_S = 120.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the lock; `started` is Unix time in seconds."""

    host: str
    pid: int
    nonce: str
    started: float


class FolderLock:
    """The lock of one folder, held from `acquire` to `release` or to the end of the process.

    flock(2) alone decides between processes of one host: the kernel lets go when the holder dies. Between hosts whose
    file system does not carry flock, the holder's heartbeat (the file's time) decides.

    Args:
        kind: what the folder is, for messages.
        key: the key of the configuration that names it.
    """

    def __init__(
        self,
        folder: Path,
        nonce: str,
        *,
        clock: Callable[[], float] = time.time,
        kind: str = "checkpoint folder",
        key: str = "checkpoint.save",
    ) -> None:
        self._kind, self._key = kind, key
        self._path = folder / "lock"
        self._me = Holder(socket.gethostname(), os.getpid(), nonce, clock())
        self._clock = clock
        self._descriptor: int | None = None
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            LockError: if another job holds it, naming its host, pid and start, or the file system has no locks to give.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._take()
        threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True).start()

    def check(self) -> None:
        """Refuse to go on if the lock is no longer ours.

        A lock file that is gone, with its folder or alone, is made again: a job that takes over leaves one.

        Raises:
            LockError: if somebody took it over.
            OSError: if the folder is gone.
        """
        if self._descriptor is not None and not self._path.exists():
            lost, self._descriptor = self._descriptor, self._take()
            os.close(lost)
        holder = self._holder()
        if self._descriptor is None or holder is None or holder.nonce != self._me.nonce:
            raise self._refusal(holder)

    def refuse_if_taken(self) -> None:
        """Refuse to go on where the lock can be read and is not ours; where it cannot be, nobody knows.

        Raises:
            LockError: if somebody took it over, who may have let it go again since.
        """
        try:
            self._path.read_bytes()
        except OSError:
            return
        holder = self._holder()
        if holder is None or holder.nonce != self._me.nonce:
            raise self._refusal(holder)

    def release(self) -> None:
        """Let go; doing so twice is fine."""
        self._stop.set()
        if self._descriptor is not None:
            holder = self._holder()
            if holder is not None and holder.nonce == self._me.nonce:  # else the name there is somebody else's
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self) -> int:
        """Take the lock file, made if it is not there, and return its descriptor."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(descriptor)
            holder = self._holder()
            if holder is not None and holder.host != self._me.host and self._clock() - self._heartbeat() < STALE_S:
                raise self._refusal(holder)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(self._me)).encode(), 0)
            os.fsync(descriptor)
        except (OSError, LockError):
            os.close(descriptor)
            raise
        return descriptor

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(self._holder()) from None
        except OSError as error:
            raise LockError(
                f"The lock of a {self._kind} cannot be taken: {error.strerror} (errno {error.errno})",
                where=self._path,
                fix=f"Let the file system carry flock(2), or name another folder with {self._key}.",
            ) from error

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            holder = self._holder()
            if holder is not None and holder.nonce == self._me.nonce:  # else it is somebody else's to keep alive
                with contextlib.suppress(OSError):
                    os.utime(self._path)

    def _heartbeat(self) -> float:
        return self._path.stat().st_mtime

    def _holder(self) -> Holder | None:
        try:
            return Holder(**json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _refusal(self, holder: Holder | None) -> LockError:
        if holder is None:
            found = "a holder that left no name"
        else:
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
            found = f"host {holder.host}, pid {holder.pid}, started {started}"
        return LockError(
            f"Another job writes to this {self._kind}",
            where=self._path.parent,
            found=found,
            fix=f"End that job, or give this one another run.name or {self._key}.",
        )
