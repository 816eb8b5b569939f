"""Makes a program wait for saves under way before it exits, with status 1 if a save fails."""

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

from reprise.ranks.group import COMMIT_TIMEOUT_S
from reprise.saving.checkpointer import LINGER_S
from reprise.storage.worker import Job

# Saves under way, by a weak reference to their saver: a dropped saver must release its folder.
_pending: dict[weakref.ref[AbstractContextManager[object]], Job | None] = {}
_THREAD = "checkpoint-end"
os.register_at_fork(after_in_child=_pending.clear)  # they are the parent's saves


def finish_at_end(saver: AbstractContextManager[object], job: Job | None) -> None:
    """Make the program's exit wait for a saver's save, unless `forget` is called first.

    At exit the saver is closed as at the end of its `with` block, with or without an error. A thread does this, since
    saving starts threads, which Python refuses in `atexit` functions since 3.12.

    Args:
        job: The save to wait for if the saver has been dropped.
    """
    _pending[weakref.ref(saver)] = job
    if all(thread.name != _THREAD for thread in threading.enumerate()):  # a forked child has none
        threading.Thread(target=_finish_all, name=_THREAD, daemon=False).start()


def forget(saver: AbstractContextManager[object]) -> None:
    """Stop the program's exit from waiting for the saver."""
    _pending.pop(weakref.ref(saver), None)


def _finish_all() -> None:
    """Wait until the main thread ends, then for all saves."""
    threading.main_thread().join()
    error = getattr(sys, "last_value", None)  # Python has printed it, and the program exits with it
    kind = None if error is None else type(error)
    try:
        with contextlib.ExitStack() as stack:
            for ref, save in _pending.items():
                if (saver := ref()) is not None:
                    stack.callback(saver.__exit__, kind, error, None)
                elif save is not None:
                    stack.callback(save.wait, COMMIT_TIMEOUT_S if error is None else LINGER_S)
    except BaseException as failure:  # noqa: BLE001 - printed, and the program ends with it
        traceback.print_exception(failure)
        if multiprocessing.parent_process() is not None:  # before 3.12 a child process calls no `atexit` functions
            _end_with_failure()
        atexit.register(_end_with_failure)


def _end_with_failure() -> None:
    """Exit with status 1 after all other exit functions. Python itself would exit with 0."""
    atexit.unregister(_end_with_failure)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)
