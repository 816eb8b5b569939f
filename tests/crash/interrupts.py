"""Interrupts a call at the n-th line that its thread executes in the library, as Ctrl-C or a signal's handler may.

A trace function raises at the line, once: what the call does to end runs undisturbed afterward. Lines of `finally`
blocks and of `__exit__` count like all others. Other threads are not interrupted, as Python runs signal handlers on the
main thread alone.

    outcome = interrupt(call, at=1)
    while outcome.place is not None:  # else the call has fewer lines
        ...
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import reprise

LIBRARY = f"{Path(reprise.__file__).parent}{os.sep}"


@dataclass(slots=True)
class Outcome:
    """What an interrupted call did.

    Args:
        lines: the number of lines executed up to the interrupt, or in all without one.
        place: the interrupted line as `file:line function`; None if the call ended before.
        error: what the call raised.
        result: what the call returned.
    """

    lines: int = 0
    place: str | None = None
    error: BaseException | None = None
    result: Any = None


@dataclass(slots=True)
class _Tracer:
    """Counts the events of one thread in the library, and raises at one of them."""

    at: int | None
    error: Callable[[], BaseException]
    kind: str
    outcome: Outcome = field(default_factory=Outcome)

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        frame.f_trace_opcodes = self.kind == "opcode"
        return self.count

    def count(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == self.kind:
            self.outcome.lines += 1
            if self.outcome.lines == self.at:
                sys.settrace(None)
                name = frame.f_code.co_filename.removeprefix(LIBRARY)
                self.outcome.place = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise self.error()  # not kept: its traceback's frames refer to this object
        return self.count


def interrupt(
    call: Callable[[], object],
    *,
    at: int | None,
    error: Callable[[], BaseException] = KeyboardInterrupt,
    opcodes: bool = False,
) -> Outcome:
    """Make a call, and raise `error` at the `at`-th line of the library that this thread executes in it.

    Args:
        at: the number of the line, from 1; None counts the lines and raises nothing.
        error: makes the exception; a `SystemExit` or a `RuntimeError` stands for a signal handler's.
        opcodes: count single instructions in place of lines.
    """
    tracer = _Tracer(at, error, "opcode" if opcodes else "line")
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        tracer.outcome.result = call()
    except BaseException as failure:  # noqa: BLE001 - the outcome has it
        tracer.outcome.error = failure
    finally:
        sys.settrace(before)
    return tracer.outcome


def count_lines(call: Callable[[], object]) -> int:
    """Return how many lines of the library this thread executes in a call, which must succeed."""
    outcome = interrupt(call, at=None)
    if outcome.error is not None:
        raise outcome.error
    return outcome.lines


def lasting_threads(before: set[threading.Thread], *, within_s: float = 5.0) -> list[str]:
    """Return the names of the threads that were not there before and do not end within a time."""
    fresh = [thread for thread in threading.enumerate() if thread not in before]
    for thread in fresh:
        if thread is not threading.current_thread():
            thread.join(within_s)
    return [thread.name for thread in fresh if thread.is_alive()]
