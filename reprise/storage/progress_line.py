"""Logs progress during long loads. Short loads are silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

EVERY_S = 5.0


def log_progress(title: str, total_bytes: int) -> Callable[[int], None]:
    """Return a call that notes how many bytes were read so far, and logs them at most every `EVERY_S` seconds.

    Args:
        title: The operation, such as "loading iteration 10".
        total_bytes: Bytes to read.
    """
    start = last = time.monotonic()

    def note(done_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY_S:
            last = now
            share, rate = done_bytes / max(1, total_bytes), done_bytes / (now - start)
            _log.info(f"{title}: {share:.0%} of {total_bytes / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s")

    return note
