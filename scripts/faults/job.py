"""Jobs that are killed: a run of the trainer with all its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from scripts.faults.ranks import launcher

_POLL_S = 0.005
_TIMEOUT_S = 300.0


class SoakJob(Protocol):
    """A job that was started."""

    def status(self) -> int | None:
        """Return its exit status, or None while it runs."""

    def kill(self) -> None:
        """Kill all its processes and wait for their end."""


class TrainerJob:
    """The trainer on ranks of this host, in its own session; its output goes to the end of a file."""

    def __init__(self, overrides: Sequence[str], output: Path, *, ranks: int) -> None:
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                [*launcher(ranks), "-m", "trainer", *overrides],
                start_new_session=True,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def status(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it and its ranks; it is stopped first, so that a torchrun does not restart them."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGSTOP)
        below = descendants(self._process.pid)
        for pid in (self._process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        wait_until(lambda: not any(_is_alive(pid) for pid in below))


def descendants(pid: int) -> list[int]:
    """Return the processes below a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [*children, *(below for child in children for below in descendants(child))]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def ended(job: SoakJob) -> Iterator[None]:
    """End the job on exit."""
    try:
        yield
    finally:
        job.kill()


def finish(job: SoakJob) -> int | None:
    """Wait for a job's end, and return its exit status."""
    with ended(job):
        wait_until(lambda: job.status() is not None)
    return job.status()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: if it does not come true in time.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("a job did not come to where it was expected in time")
        time.sleep(_POLL_S)
