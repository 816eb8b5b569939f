"""A lease: a file that names the process that has a folder, kept alive by a heartbeat, its modification time.

A process of the same host sees whether the holder lives; all others see the heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from reprise.storage.paths import read_regular
from reprise.storage.worker import Job

T = TypeVar("T")

HEARTBEAT_S = 15.0
_LOOK_S = 1.0
_RELEASE_S = 5.0  # for a file system that hangs
_MOST_BYTES = 64 << 10


class Lease:
    """A file that this process keeps alive on a thread of its own; an interrupt of the caller leaves the thread alone.

    A process that drops a lease keeps it until it ends.

    Args:
        path: what is leased.

    Attributes:
        descriptor: the open file, which the call of `begin` opens and the end of the lease closes; -1 without a lease.
        calls: calls for the thread; None ends it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, -1
        self.calls: SimpleQueue[Job | None] = SimpleQueue()
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def beat(self) -> None:
        """Show other hosts that this process lives."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Show all others that nobody has the lease."""
        raise NotImplementedError

    def begin(self, make: Callable[[], None]) -> None:
        """Start the thread, then make the file; called once."""
        try:
            self._thread.start()
            leases.add(self)
            make()
        except BaseException:
            self.release()
            raise

    def run(self, call: Callable[[], None]) -> None:
        """Make a call on the thread, and raise its exception; nothing is called after the lease's end."""
        job = Job(call)
        self.calls.put(job)
        self.await_job(job)

    def await_job(self, job: Job) -> None:
        """Wait for a queued job, and raise its exception; return at the lease's end."""
        while not job.ends(_LOOK_S):
            if self.is_over.is_set():
                return
        job.wait()

    def release(self) -> None:
        """Give the lease up; calling it again is fine. A thread that hangs keeps it until the process ends."""
        self.calls.put(None)
        if self._thread.ident is not None:  # else it never began, for want of threads
            self.is_over.wait(_RELEASE_S)

    def close(self) -> None:
        """Close the file. So does a forked child, whose parent has the thread: it would keep an flock alive."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.is_over.set()

    def _keep(self) -> None:
        while True:
            try:
                job = self.calls.get(timeout=HEARTBEAT_S)
            except Empty:
                with contextlib.suppress(OSError):
                    self.beat()
                continue
            if job is None:
                break
            job.run()
            del job
        with contextlib.suppress(OSError):
            self.give_up()
        self.close()
        leases.discard(self)  # later than the close: a fork before it would keep the file open


leases = set[Lease]()  # of this process


def _leave_to_parent() -> None:
    for lease in leases:
        lease.close()
    leases.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def record_in(path: Path, kind: Callable[..., T]) -> T | None:
    """Return the record in a file; None for a torn one, or none.

    Args:
        kind: makes the record from its fields, and raises if it cannot be one.

    Raises:
        OSError: if the file cannot be read.
    """
    try:
        return kind(**json.loads(read_regular(path, limit_bytes=_MOST_BYTES)))
    except (OverflowError, RecursionError, TypeError, ValueError):
        return None
