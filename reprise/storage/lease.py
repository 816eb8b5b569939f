"""A lease: a file with flock(2) held by its owner, whose process it names.

The kernel releases the flock when the owner dies. Other hosts, where flock may not reach, see a heartbeat: the file's
modification time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from reprise.storage.files import keep_block
from reprise.storage.paths import read_regular

HEARTBEAT_S = 15.0
_RELEASE_S = 5.0  # limits the wait for a hung file system


class Holder(NamedTuple):
    """A lease's owner. `started` is Unix time in seconds."""

    host: str
    pid: int
    nonce: str
    started: float

    @staticmethod
    def of(path: Path) -> Holder | None:
        """Return the holder in a file's record, or None if the record is empty or torn.

        Raises:
            OSError: The file cannot be read.
        """
        try:
            holder = Holder(**json.loads(read_regular(path)))
            time.localtime(holder.started)  # raises if out of range
            return holder
        except (OverflowError, RecursionError, TypeError, ValueError):
            return None


class Lease:
    """A file kept alive by a separate thread, which an interrupt in the caller does not reach.

    A lease dropped without `release` stays until the process ends.

    Args:
        path: The leased file.
        nonce: A random name for the owner.
        host: This host, as its records name it. By default its name.

    Attributes:
        descriptor: The open file, opened within `begin` and closed at the lease's end. -1 without a lease.
        calls: Calls for the thread, which ignores their file system errors. None ends it.
        is_synced: Whether other hosts can read the record.
        owner: The object using a lock; see `FolderLock`.
        dropped: Ends the lease once nothing refers to the lock. Kept here, since it must outlive the lock.
    """

    owner: weakref.ref[object]
    dropped: weakref.ref[object]

    def __init__(self, path: Path, nonce: str, host: str | None = None) -> None:
        self.path, self.descriptor, self.is_synced = path, -1, False
        self.me = Holder(host or socket.gethostname(), os.getpid(), nonce, time.time())
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="lease", daemon=True)

    def is_mine(self) -> bool:
        """Return whether the file names this lease.

        Raises:
            OSError: The file cannot be read.
        """
        return Holder.of(self.path) == self.me

    def beat(self) -> None:
        """Show other hosts that this process is alive."""
        if self.is_mine():
            os.utime(self.path)

    def give_up(self) -> None:
        """Show all other processes that the lease is free."""
        if self.is_mine():
            os.ftruncate(self.descriptor, 0)
            keep_block(self.descriptor)

    def write_record(self) -> None:
        """Name this process in the file."""
        os.pwrite(self.descriptor, json.dumps(self.me._asdict()).encode(), 0)

    def sync(self) -> None:
        """Make the record durable, for other hosts to read. Repeated calls do nothing."""
        if not self.is_synced:
            os.fsync(self.descriptor)
            self.is_synced = True

    def begin(self, make: Callable[[], None]) -> None:
        """Start the thread, then call `make` to create the file. Called once."""
        try:
            self._thread.start()
            leases.add(self)
            make()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give up the lease. Repeated calls do nothing. A hung thread keeps it until the process ends."""
        self.calls.put(None)
        if self._thread.ident is not None:  # otherwise the system refused to start the thread
            self.is_over.wait(_RELEASE_S)

    def close(self) -> None:
        """Close the file. A forked child must close it too, or its copy would keep the flock alive."""
        descriptor, self.descriptor = self.descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)
        self.is_over.set()

    def _run_thread(self) -> None:
        while True:
            try:
                call = self.calls.get(timeout=HEARTBEAT_S)
            except Empty:
                call = self.beat
            if call is None:
                break
            with contextlib.suppress(OSError):
                call()
        with contextlib.suppress(OSError):
            self.give_up()
        self.close()
        leases.discard(self)  # after closing: a child forked in between would keep the file open


leases = set[Lease]()  # all leases in this process


def _leave_to_parent() -> None:
    for lease in leases:
        lease.close()
    leases.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
