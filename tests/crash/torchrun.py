"""A torchrun whose workers have gates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from scripts.faults.job import descendants
from tests import ROOT
from tests.crash.moments import Gate, describe

TIMEOUT_S = 300.0
TWO_RANKS = ("--standalone", "--nproc-per-node", "2")


class Agent:
    """A torchrun that was started."""

    def __init__(self, options: Sequence[str], gates: Sequence[Gate], run: Path, overrides: Sequence[str]) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.crash.moments"]
        run.parent.mkdir(parents=True, exist_ok=True)
        self._output = run.with_name(f"agent{len(list(run.parent.glob('agent*')))}.log")
        with self._output.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, describe(gates), f"run.dir={run}", *overrides],
                cwd=ROOT,
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """End it and its workers with SIGKILL at once, as when a host is lost."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)
            for pid in (self.process.pid, *descendants(self.process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> tuple[int, str]:
        """Wait for its end and return status and output."""
        return self.process.wait(TIMEOUT_S), self._output.read_text()


@contextmanager
def torchrun(options: Sequence[str], gates: Sequence[Gate], run: Path, overrides: Sequence[str]) -> Iterator[Agent]:
    """Start a torchrun of the trainer, and end all of it afterwards."""
    agent = Agent(options, gates, run, overrides)
    try:
        yield agent
    finally:
        agent.kill()
