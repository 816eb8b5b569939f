"""Background threads that each run one job at a time."""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from reprise.errors import CheckpointError

T = TypeVar("T")


class Job:
    """A call that runs on the worker; its outcome is available once `wait` returns."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._done = threading.Event()
        self._error: BaseException | None = None

    @staticmethod
    def run_from(queue: SimpleQueue[Job | None], _dropped: object = None) -> None:
        """Run jobs in their order until None comes; each keeps its exception. Called by a worker only.

        Args:
            _dropped: a reference that puts None once what it refers to is gone; it has to live until then.
        """
        while (job := queue.get()) is not None:
            job.run()
            del job
        queue.put(None)  # for the next thread

    def run(self) -> None:
        """Make the call, and keep its exception. Called once, by a worker only."""
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            _clear_frames(error)  # the error may be kept for long, what the call had in hand is of no use
            self._error = error
        finally:
            self._call = _nothing  # what it holds is not needed any more
            self._done.set()
            del self  # the traceback of the error refers to this frame

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Return the exception of the call once it is done."""
        return self._error

    def ends(self, timeout_s: float | None) -> bool:
        """Return whether the call finishes within `timeout_s`; without a limit, wait."""
        return self._done.wait(timeout_s)

    def wait(self, timeout_s: float | None = None, *, where: object = None) -> None:
        """Wait for the call, forever without a timeout, and raise its exception.

        Args:
            where: the checkpoint that the call saves, for the message.

        Raises:
            CheckpointError: if it did not finish within `timeout_s`.
        """
        if not self._done.wait(timeout_s):
            raise CheckpointError(
                "A save did not end in time",
                where=where,
                expected=f"an end within commit_timeout_s={timeout_s:.0f}",
                fix="The disk or a peer hangs; committed checkpoints are untouched.",
            )
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the traceback of the error refers to this frame, and to its callers


def _clear_frames(error: BaseException) -> None:
    """Release the local variables of the functions that an error and its causes passed through."""
    queue, seen = [error], set[int]()
    while queue:
        exception = queue.pop()
        seen.add(id(exception))
        traceback.clear_frames(exception.__traceback__)
        for before in (exception.__cause__, exception.__context__):
            if before is not None and id(before) not in seen:
                queue.append(before)


def _nothing() -> None:
    """Do nothing."""


class Worker:
    """Runs jobs in turn on daemon threads; the program's exit does not wait for them.

    Each of the first jobs starts one. The threads end with the worker, after the jobs that it was given.
    """

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._name, self._count = name, threads
        self._open()

    def _open(self) -> None:
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._dropped = ending_with(self, self._queue)

    def submit(self, call: Callable[[], None]) -> Job:
        """Queue a call and return its job."""
        if len(self._threads) < self._count:
            queue = (self._queue, self._dropped)
            thread = threading.Thread(target=Job.run_from, args=queue, name=self._name, daemon=True)
            thread.start()  # the system may refuse it
            self._threads.append(thread)
        job = Job(call)
        self._queue.put(job)
        return job

    def close(self, timeout_s: float | None = None) -> None:
        """Let the threads end after the queued jobs; a thread that hangs is a daemon and is left behind."""
        self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        self._open()


def ending_with(owner: T, queue: SimpleQueue[Job | None]) -> weakref.ref[T]:
    """Return a reference that puts None once its owner is gone.

    That may be at any point of any thread. It runs nothing of Python, which could be interrupted or wait for a lock
    that the same thread has.
    """
    return weakref.ref(owner, partial(queue.put, None))


class Stopped(Exception):
    """Ends a call of `run_together` after another call has failed."""


def run_together(calls: Sequence[Callable[[], None]], *, name: str, threads: int) -> None:
    """Run calls on this thread and on at most `threads - 1` more, wait for all, and raise the first error.

    A single call needs no thread. The threads that are there run the calls where no other can be started: the system
    refuses it, and Python 3.12.0 to 3.12.2 does once the main thread has ended. `Stopped` is raised only if there is no
    other error.
    """
    jobs = [Job(call) for call in calls]
    queue: SimpleQueue[Job | None] = SimpleQueue()
    for job in (*jobs, None):
        queue.put(job)
    helpers = [
        threading.Thread(target=Job.run_from, args=(queue,), name=name, daemon=True)
        for _ in range(min(threads, len(jobs)) - 1)
    ]
    started = list[threading.Thread]()
    try:
        with contextlib.suppress(RuntimeError):
            for helper in helpers:
                helper.start()
                started.append(helper)
        Job.run_from(queue)
        errors = [job.error for job in jobs if job.ends(None) and job.error is not None]
    finally:  # whatever interrupts this thread: what the others work on is not used again before they end
        queue.put(None)  # in place of one that this thread had in hand
        for helper in started:
            helper.join()
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error
