"""The end of a program with open savers: it waits for their saves, and its status is 1 if a save fails."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ending:
    """How a saver with a save under way ends.

    Args:
        close: waits for the save, and raises its error.
        abandon: waits for the save for a limited time, and raises nothing.
    """

    close: Callable[[], None]
    abandon: Callable[[], None]


_endings: dict[object, Ending] = {}
_watch: list[threading.Thread] = []
os.register_at_fork(after_in_child=_endings.clear)  # the saves are the parent's


def finish_at_end(saver: object, ending: Ending) -> None:
    """Let the program's end wait for the save of a saver, unless `forget` comes first.

    A program ended by an error abandons the save; any other closes the saver. A thread does it, as the writers start
    threads, which Python refuses to functions of `atexit` from 3.12 on.
    """
    _endings[saver] = ending
    if not _watch or not _watch[0].is_alive():
        _watch[:] = [threading.Thread(target=_finish_all, name="checkpoint-end", daemon=False)]
        _watch[0].start()


def forget(saver: object) -> None:
    """Let the program end without the saver."""
    _endings.pop(saver, None)


def _finish_all() -> None:
    """Wait for the end of the main thread, then for all saves."""
    threading.main_thread().join()
    has_failed = hasattr(sys, "last_value")  # Python has printed the error that ends the program
    try:
        with contextlib.ExitStack() as stack:
            for ending in _endings.values():
                stack.callback(ending.abandon if has_failed else ending.close)
    except BaseException as error:  # noqa: BLE001 - printed, and the program ends with it
        traceback.print_exception(error)
        if multiprocessing.parent_process() is not None:  # before 3.12 such a process calls nothing of `atexit`
            _end_with_failure()
        atexit.register(_end_with_failure)


def _end_with_failure() -> None:
    """End with status 1, after all other calls at the end; Python itself would end with 0."""
    atexit.unregister(_end_with_failure)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)
