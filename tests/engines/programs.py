"""Runs the examples that use other engines as programs, kills them with all their processes, and reads what they print.

A program is the first process of a session of its own. What an engine starts stays in the session, so a test finds it
there, whatever has become of its parent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests import ROOT

TIMEOUT_S = 300.0
_POLL_S = 0.05
# Ray begins a line of a worker with the worker's name, in colors.
_FIGURES = re.compile(r"^(?:\x1b\[36m\(\w+ pid=\d+\)\x1b\[0m )?(\d+) (-?0x\S+)$", re.MULTILINE)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped where a package is not installed, which is not imported for that."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed: see `make test-engines`")


def example(name: str, *arguments: object) -> list[str]:
    """Return the command of a program of `examples/`."""
    return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]


def held_example(name: str, last: int, *arguments: object) -> list[str]:
    """Return the command of a program that stands still for good after it has printed iteration `last`."""
    return [sys.executable, "-m", "tests.engines.held", name, str(last), *map(str, arguments)]


def figures(output: Path) -> dict[int, str]:
    """Return the figures that a program has printed so far, by iteration."""
    return {int(iteration): value for iteration, value in _FIGURES.findall(output.read_text())}


@contextmanager
def started(command: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program whose output goes to a file, and kill what is left of its session at the end."""
    with _scratch() as scratch, output.open("wb") as file:
        program = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=ROOT, env=_environment(scratch), start_new_session=True
        )
        try:
            yield program
        finally:
            kill(program)


def run_ok(command: Sequence[str], output: Path) -> str:
    """Run a program to its end, which leaves no process behind, and return what it printed."""
    with started(command, output) as program:
        program.wait(TIMEOUT_S)
        processes = [process for process in _session(program) if process.pid != program.pid]
        _, alive = psutil.wait_procs(processes, TIMEOUT_S / 10)
        assert program.returncode == 0, output.read_text()
        assert not alive, alive
    return output.read_text()


def wait_until(condition: Callable[[], bool], program: subprocess.Popen[bytes], output: Path) -> None:
    """Wait until a condition holds, while the program runs."""
    for _ in range(int(TIMEOUT_S / _POLL_S)):
        if condition():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_POLL_S)
            raise AssertionError(f"the program ended early:\n{output.read_text()}")
    raise TimeoutError(output.read_text())


def kill(program: subprocess.Popen[bytes]) -> None:
    """Kill a program and all processes of its session, and wait for their ends."""
    while processes := _session(program):  # some may just have been started by others
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        if program.returncode is None:
            program.wait(TIMEOUT_S / 10)
        _, alive = psutil.wait_procs(processes, TIMEOUT_S / 10)
        assert not alive, alive


def _session(program: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the living processes of the session of a program."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == program.pid and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


@contextmanager
def _scratch() -> Iterator[str]:
    """Yield a new folder with a short name: the names of Ray's sockets have at most 107 bytes."""
    folder = tempfile.mkdtemp(prefix="engine")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(scratch: str) -> dict[str, str]:
    """Return the environment of a program: Ray reports nothing, listens on loopback alone, and writes to `scratch`."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": scratch,
        "RAY_TMPDIR": scratch,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the user's home
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 2}),  # two workers, on any machine
    }
