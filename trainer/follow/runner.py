"""Runs a command to completion, and reads the numbers it prints."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from reprise.errors import ConfigError
from reprise.storage import Json, finite_number, json_file

_MOST_LINE_BYTES = 1 << 20  # per JSON line in a command's output
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, prctl(2)
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How a command ended.

    Args:
        status: The exit status. For a command ended by a signal, the negative signal number.
        result: The last JSON object printed on a line by itself, or None.
    """

    status: int
    seconds: float
    result: Json | None = None


def run_command(command: Sequence[str]) -> CommandOutcome:
    """Run a command to completion in its own session. Its output is forwarded to this process's output.

    A KeyboardInterrupt ends the command by SIGTERM, and a second one kills it. If this process is killed, the command
    dies too.

    Raises:
        ConfigError: The command cannot be started.
    """
    start, result = time.monotonic(), None
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        raise ConfigError("A command cannot be started", where=command[0], found=error.strerror) from error
    with process:
        try:
            assert process.stdout is not None
            for line in iter(partial(process.stdout.readline, _MOST_LINE_BYTES), b""):
                print(line.decode(errors="backslashreplace"), end="", flush=True)
                result = _json_object(line) or result
            status = process.wait()
        except KeyboardInterrupt:
            _end(process, signal.SIGTERM)
            process.communicate()
            raise
        finally:
            _end(process, signal.SIGKILL)
    return CommandOutcome(status, time.monotonic() - start, result)


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _die_with_parent() -> None:
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _json_object(line: bytes) -> Json | None:
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(line)
        json_file.require_depth(value)  # otherwise no line in the log could hold it
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number_at(result: Any, name: str) -> float | None:
    """Return the finite number under a name, the keys in nested objects joined by dots, or None."""
    try:
        for key in name.split("."):
            result = result[key]
        return finite_number(result)
    except (LookupError, TypeError, ValueError):
        return None
