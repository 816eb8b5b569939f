"""Runs commands to completion, and reads the numbers they print."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType

from reprise.errors import ConfigError
from reprise.storage import Json, finite_number, json_file

_MOST_LINE_BYTES = 1 << 20  # per JSON line in a command's output
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, prctl(2)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
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


class Commands:
    """Runs commands and waits between them, until SIGINT or SIGTERM. Main thread only.

    The first signal is forwarded to the running command as SIGTERM. A second signal kills the command. If the follower
    is killed, the command dies too.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._handlers: dict[int, object] = {}
        self.is_stopped = False

    def __enter__(self) -> Commands:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until a signal arrives."""
        select.select([self._reader], [], [], seconds)

    def run(self, command: Sequence[str]) -> CommandOutcome:
        """Run a command to completion in its own session. Its output is forwarded to this process's output.

        Raises:
            ConfigError: The command cannot be started.
        """
        start, result = self._clock(), None
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
                self._process = process
                if self.is_stopped:  # the signal arrived before the process existed
                    self._end(signal.SIGTERM)
                assert process.stdout is not None
                for line in iter(partial(process.stdout.readline, _MOST_LINE_BYTES), b""):
                    print(line.decode(errors="backslashreplace"), end="", flush=True)
                    result = _json_object(line) or result
                status = process.wait()
            finally:
                self._end(signal.SIGKILL)  # if an error here left the command running
                self._process = None
        return CommandOutcome(status, self._clock() - start, result)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        number = signal.SIGKILL if self.is_stopped else signal.SIGTERM
        self.is_stopped = True
        self._end(number)

    def _end(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


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


def number_at(result: object, name: str) -> float | None:
    """Return the finite number under a dotted key in nested objects, or None.

    A key that itself contains dots also matches.
    """
    if not isinstance(result, dict):
        return None
    if name in result:
        try:
            return finite_number(result[name])
        except ValueError:
            return None
    for dot in (match.start() for match in re.finditer(r"\.", name)):
        number = number_at(result.get(name[:dot]), name[dot + 1 :])
        if number is not None:
            return number
    return None
