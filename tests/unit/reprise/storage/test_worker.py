"""Jobs on background threads: what is left of one that failed."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest

from reprise.errors import CheckpointError
from reprise.storage.worker import Stopped, Worker, run_together
from tests.fakes import JOIN_S


class Buffer:
    """Stands for memory that a job has in hand."""


def test_a_kept_error_does_not_keep_the_job_s_data() -> None:
    held: list[weakref.ref[Buffer]] = []

    def fail(error: Exception) -> None:
        data = Buffer()
        held.append(weakref.ref(data))
        raise error

    def call() -> None:
        own = Buffer()
        held.append(weakref.ref(own))
        try:
            try:
                fail(ValueError())
            except ValueError:
                fail(OSError(5, "Input/output error"))
        except OSError as error:
            raise CheckpointError("Writing failed") from error

    worker = Worker("test")
    job = worker.submit(call)
    with pytest.raises(CheckpointError) as caught:
        job.wait(JOIN_S)
    worker.close()
    gc.collect()
    assert isinstance(caught.value.__cause__, OSError)
    assert [reference() for reference in held] == [None] * 3


def test_a_job_that_does_not_end_reports_no_outcome() -> None:
    worker, released = Worker("test"), threading.Event()
    job = worker.submit(lambda: released.wait(JOIN_S))
    with pytest.raises(CheckpointError, match="did not end in time") as caught:
        job.wait(0.0)
    released.set()
    worker.close(JOIN_S)
    job.wait(JOIN_S)
    assert "nothing was committed" not in str(caught.value)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_calls_together_all_end_before_the_first_error(threads: int) -> None:
    ended: list[int] = []

    def call(number: int) -> None:
        ended.append(number)
        if number == 0:
            raise Stopped
        if number in (1, 2):
            raise OSError(number)

    with pytest.raises(OSError, match="1"):
        run_together([partial(call, number) for number in range(4)], name="test", threads=threads)
    assert sorted(ended) == [0, 1, 2, 3]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_calls_need_no_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    start, started, ended = threading.Thread.start, list[threading.Thread](), list[int]()

    def refuse(thread: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def call(number: int) -> None:
        if number < 1 + most:  # on as many threads as there are
            barrier.wait(JOIN_S)
        ended.append(number)

    threads = list[threading.Thread]()
    run_together([lambda: threads.append(threading.current_thread())], name="test", threads=3)
    assert threads == [threading.current_thread()]  # a single call needs none
    barrier = threading.Barrier(1 + most)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    run_together([partial(call, number) for number in range(5)], name="test", threads=4)
    assert sorted(ended) == [0, 1, 2, 3, 4]


def test_an_interrupt_of_a_start_leaves_no_call_running(monkeypatch: pytest.MonkeyPatch) -> None:
    start, ended = threading.Thread.start, list[int]()
    running = list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        running.append(threading.Thread(target=thread.run))  # runs, and `thread` has no number yet
        start(running[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_together([partial(ended.append, number) for number in range(3)], name="test", threads=2)
    running[0].join(JOIN_S)
    assert not ended
