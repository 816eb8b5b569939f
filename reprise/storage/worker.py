"""Background threads, which run queued jobs."""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue

from reprise.errors import CheckpointError


class Job:
    """A call run by a worker. Its outcome is available once `wait` returns.

    Attributes:
        error: The call's exception. None before its end or after success.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._done = threading.Event()
        self.error: BaseException | None = None

    @staticmethod
    def run_all(jobs: Iterable[Job], _dropped: object = None) -> None:
        """Run jobs in order. Each keeps its exception. Other threads may take jobs from the same iterator.

        Args:
            _dropped: A weak reference that ends the jobs once its referent is gone. Kept alive here until then.
        """
        for job in jobs:
            try:
                job._call()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                _clear_frames(error)  # the error may live long and would keep the call's local variables alive
                job.error = error
            finally:
                del job._call  # frees what the call refers to
                job._done.set()
                del job  # the error's traceback refers to this frame

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def ends(self, timeout_s: float | None) -> bool:
        """Wait up to `timeout_s` seconds (None: forever) and return whether the call has ended."""
        return self._done.wait(timeout_s)

    def wait(self, timeout_s: float | None = None, *, where: object = None) -> None:
        """Wait for the call and raise its exception.

        Args:
            timeout_s: Seconds to wait. None waits forever.
            where: The checkpoint being saved, for the message.

        Raises:
            CheckpointError: The call did not end within `timeout_s`.
        """
        if not self._done.wait(timeout_s):
            raise CheckpointError(
                "A save did not end in time",
                where=where,
                expected=f"an end within commit_timeout_s={timeout_s:.0f}",
                fix="The disk or another rank hangs. The next save checks whether this one was committed.",
            )
        if self.error is not None:
            try:
                raise self.error
            finally:
                del self  # the error's traceback refers to this frame and its callers


def _clear_frames(error: BaseException | None) -> None:
    """Clear local variables in all frames of an error and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class Worker:
    """Runs jobs in order on a daemon thread, which the first job starts. The program's exit does not wait for it.

    The thread ends after the queued jobs, once the worker is closed or dropped.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        # Once nothing refers to this worker, None ends the thread. This may happen at any point in any thread: the
        # callback runs no Python code, which could be interrupted or wait for a lock held by the same thread.
        jobs = (iter(self._queue.get, None), weakref.ref(self, partial(self._queue.put, None)))
        self._thread = threading.Thread(target=Job.run_all, args=jobs, name=name, daemon=True)

    def submit(self, call: Callable[[], None]) -> Job:
        """Queue a call and return its job."""
        if self._thread.ident is None:
            self._thread.start()  # the system may refuse another thread
        job = Job(call)
        self._queue.put(job)
        return job

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread after the queued jobs, the last. Wait at most `timeout_s`, then leave it behind."""
        self._queue.put(None)
        with contextlib.suppress(RuntimeError):  # it has not started
            self._thread.join(timeout_s)


class Stopped(Exception):
    """Ends a call of `run_together` after another call has failed."""


def run_together(calls: Sequence[Callable[[], object]], *, name: str, threads: int) -> None:
    """Run calls on this thread and at most `threads - 1` others, wait for all, and raise the first error.

    A single call starts no thread. If the system refuses a thread, or Python 3.12.0 to 3.12.2 does because the main
    thread has ended, existing threads run the calls. `Stopped` is raised only if no other error occurred.
    """
    jobs = [Job(call) for call in calls]
    waiting = iter(jobs)  # shared by all threads
    helpers = [Worker(name) for _ in jobs[1:threads]]
    try:
        with contextlib.suppress(RuntimeError):
            for helper in helpers:
                helper.submit(partial(Job.run_all, waiting))
        Job.run_all(waiting)
    finally:  # even if this thread is interrupted: the caller may reuse the calls' data
        for helper in helpers:
            helper.close()
    errors = [job.error for job in jobs if job.error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error
