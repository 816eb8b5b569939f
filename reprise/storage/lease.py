"""A lease: a file with flock(2) held by its owner, whose process it names.

The kernel releases the flock when the owner dies. Other hosts, where flock may not reach, see a heartbeat: the file's
modification time.
"""

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
from queue import Empty, SimpleQueue

from reprise.storage.paths import open_regular, read_regular
from reprise.storage.worker import Job

HEARTBEAT_S = 15.0
_POLL_S = 1.0
_RELEASE_S = 5.0  # limits the wait for a hung file system
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Holder:
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
            holder = Holder(**json.loads(read_regular(path, limit_bytes=_MAX_BYTES)))
            time.localtime(holder.started)  # raises if out of range
            return holder
        except (OverflowError, RecursionError, TypeError, ValueError):
            return None


def is_alive(path: Path, host: str) -> bool | None:
    """Return whether the owner of a lease file runs, or None if only its heartbeat can tell.

    Args:
        host: This host, as its records name it.

    Raises:
        OSError: The file cannot be read.
    """
    descriptor = open_regular(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    holder = Holder.of(path)
    return False if holder is not None and holder.host == host else None


class Lease:
    """A file kept alive by a separate thread, which an interrupt in the caller does not reach.

    A lease dropped without `release` stays until the process ends.

    Args:
        path: The leased file.
        nonce: A random name for the owner.
        host: This host, as its records name it. By default its name.

    Attributes:
        descriptor: The open file, opened within `begin` and closed at the lease's end. -1 without a lease.
        calls: Calls for the thread. None ends it.
    """

    def __init__(self, path: Path, nonce: str, host: str | None = None) -> None:
        self.path, self.descriptor = path, -1
        self.me = Holder(host or socket.gethostname(), os.getpid(), nonce, time.time())
        self.calls: SimpleQueue[Job | None] = SimpleQueue()
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="lease", daemon=True)

    def beat(self) -> None:
        """Show other hosts that this process is alive."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Show all other processes that the lease is free."""
        raise NotImplementedError

    def write_record(self) -> None:
        """Name this process in the empty file."""
        os.pwrite(self.descriptor, json.dumps(asdict(self.me)).encode(), 0)

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
