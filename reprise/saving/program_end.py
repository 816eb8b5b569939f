"""The end of a program with saves under way: it waits for them, and its status is 1 if one fails."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
import weakref
from contextlib import AbstractContextManager

from reprise.saving.checkpointer import Landing

# The saves under way by their savers, which they do not keep alive: a dropped saver lets go of its folder.
_endings: dict[weakref.ref[AbstractContextManager[object]], Landing | None] = {}
_watch: list[threading.Thread] = []
os.register_at_fork(after_in_child=_endings.clear)  # the saves are the parent's


def finish_at_end(saver: AbstractContextManager[object], landing: Landing | None) -> None:
    """Let the program's end wait for the save of a saver, unless `forget` comes first.

    The end of the program is that of the saver's block, with or without an error. A thread does it, as the writers
    start threads, which Python refuses to functions of `atexit` from 3.12 on.

    Args:
        landing: what is waited for if the saver has been dropped.
    """
    for dropped in [ref for ref, save in _endings.items() if ref() is None and (save is None or save.is_over)]:
        del _endings[dropped]
    _endings[weakref.ref(saver)] = landing
    if not _watch or not _watch[0].is_alive():
        _watch[:] = [threading.Thread(target=_finish_all, name="checkpoint-end", daemon=False)]
        _watch[0].start()


def forget(saver: AbstractContextManager[object]) -> None:
    """Let the program end without the saver."""
    _endings.pop(weakref.ref(saver), None)


def _finish_all() -> None:
    """Wait for the end of the main thread, then for all saves."""
    threading.main_thread().join()
    error = getattr(sys, "last_value", None)  # Python has printed it: the program ends by it
    kind = None if error is None else type(error)
    try:
        with contextlib.ExitStack() as stack:
            for saver, landing in _endings.items():
                if (ending := saver() or landing) is not None:
                    stack.callback(ending.__exit__, kind, error, None)
    except BaseException as failure:  # noqa: BLE001 - printed, and the program ends with it
        traceback.print_exception(failure)
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
