"""Worker processes for work that takes longer than starting them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor


def spawned_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool with new processes, which end when this process ends, even if it is killed.

    They ignore the terminal's signals and log nothing. They are spawned, because a process forked while a library's
    threads run might hang.
    """
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    logging.disable()  # the parent reads the same files
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
