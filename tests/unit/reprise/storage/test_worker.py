"""Jobs on background threads: what is left of one that failed."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from reprise.errors import CheckpointError
from reprise.storage.worker import Worker
from tests.fakes import JOIN_S


class Buffer:
    """Stands for memory that a job has in hand."""


def test_a_kept_error_does_not_keep_the_job_s_data() -> None:
    held: list[weakref.ref[Buffer]] = []

    def fail() -> None:
        cause = Buffer()
        held.append(weakref.ref(cause))
        raise OSError(5, "Input/output error")

    def suppress() -> None:
        context = Buffer()
        held.append(weakref.ref(context))
        raise ValueError

    def call() -> None:
        own = Buffer()
        held.append(weakref.ref(own))
        try:
            try:
                suppress()
            except ValueError:
                fail()
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
    job = worker.submit(lambda: assert_set(released))
    with pytest.raises(CheckpointError, match="did not end in time") as caught:
        job.wait(0.0)
    released.set()
    worker.close(JOIN_S)
    job.wait(JOIN_S)
    assert "nothing was committed" not in str(caught.value)


def assert_set(event: threading.Event) -> None:
    assert event.wait(JOIN_S)
