"""A lease: a file naming a folder's owner process, kept alive by a heartbeat, its modification time.

A process on the same host can check whether the owner runs. All others see the heartbeat.
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
_POLL_S = 1.0
_RELEASE_S = 5.0  # limits the wait for a hung file system
_MAX_BYTES = 64 << 10


class Lease:
    """A file kept alive by a separate thread, which an interrupt in the caller does not reach.

    A lease dropped without `release` stays until the process ends.

    Args:
        path: The leased path.

    Attributes:
        descriptor: The open file, opened within `begin` and closed at the lease's end. -1 without a lease.
        calls: Calls for the thread. None ends it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, -1
        self.calls: SimpleQueue[Job | None] = SimpleQueue()
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="lease", daemon=True)

    def beat(self) -> None:
        """Show other hosts that this process is alive."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Show all other processes that the lease is free."""
        raise NotImplementedError

    def begin(self, make: Callable[[], None]) -> None:
        """Start the thread, then call `make` to create the file. Called once."""
        try:
            self._thread.start()
            leases.add(self)
            make()
        except BaseException:
            self.release()
            raise

    def run(self, call: Callable[[], None]) -> None:
        """Run a call on the thread and raise its exception. After the lease's end, do nothing."""
        job = Job(call)
        self.calls.put(job)
        self.await_job(job)

    def await_job(self, job: Job) -> None:
        """Wait for a queued job and raise its exception. Return early if the lease ends."""
        while not job.ends(_POLL_S):
            if self.is_over.is_set():
                return
        job.wait()

    def release(self) -> None:
        """Give up the lease. Repeated calls do nothing. A hung thread keeps it until the process ends."""
        self.calls.put(None)
        if self._thread.ident is not None:  # otherwise the system refused to start the thread
            self.is_over.wait(_RELEASE_S)

    def close(self) -> None:
        """Close the file. A forked child must close it too, or its copy would keep the flock alive."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.is_over.set()

    def _run_thread(self) -> None:
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
        leases.discard(self)  # after closing: a child forked in between would keep the file open


leases = set[Lease]()  # all leases in this process


def _leave_to_parent() -> None:
    for lease in leases:
        lease.close()
    leases.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def record_in(path: Path, kind: Callable[..., T]) -> T | None:
    """Return the record in a file, or None if it is empty or torn.

    Args:
        kind: Builds the record from its fields, and raises if they are invalid.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        return kind(**json.loads(read_regular(path, limit_bytes=_MAX_BYTES)))
    except (OverflowError, RecursionError, TypeError, ValueError):
        return None
