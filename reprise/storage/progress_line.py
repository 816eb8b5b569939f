"""Logs the progress of long transfers from time to time; short ones are silent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

EVERY_S = 5.0


class ProgressLine:
    """Logs the progress of a transfer of `total_bytes`, at most every `EVERY_S`; several threads may add to it.

    Args:
        title: the operation, such as "saving iteration 10".
        start: the clock's seconds at which it began; None for now.
    """

    def __init__(
        self, title: str, total_bytes: int, *, start: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._total_bytes, self._clock = title, total_bytes, clock
        self._start = self._said = clock() if start is None else start
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, done_bytes: int) -> None:
        """Count transferred bytes."""
        with self._lock:
            self._done_bytes += done_bytes
            self._say()

    def at(self, done_bytes: int) -> None:
        """Set the number of bytes transferred so far."""
        with self._lock:
            self._done_bytes = done_bytes
            self._say()

    def _say(self) -> None:
        now = self._clock()
        if now - self._said < EVERY_S:
            return
        self._said = now
        share, rate = self._done_bytes / max(1, self._total_bytes), self._done_bytes / (now - self._start)
        _log.info(f"{self._title}: {share:.0%} of {self._total_bytes / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s")
