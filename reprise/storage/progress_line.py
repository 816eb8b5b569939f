"""Logs progress during long transfers. Short transfers are silent."""

from __future__ import annotations

import logging
import time

_log = logging.getLogger(__name__)

EVERY_S = 5.0


class ProgressLine:
    """Logs a transfer's progress, at most every `EVERY_S` seconds.

    Args:
        title: The operation, such as "saving iteration 10".
        total_bytes: Bytes to transfer.
    """

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title, self._total_bytes = title, total_bytes
        self._start = self._last_time = time.monotonic()
        self._added_bytes = 0

    def add(self, done_bytes: int) -> None:
        """Count transferred bytes. Threads may call it at once, and rarely miss a count."""
        self._added_bytes += done_bytes
        self.at(self._added_bytes)

    def at(self, done_bytes: int) -> None:
        """Note how many bytes have been transferred so far."""
        now = time.monotonic()
        if now - self._last_time < EVERY_S:
            return
        self._last_time = now
        share, rate = done_bytes / max(1, self._total_bytes), done_bytes / (now - self._start)
        _log.info(f"{self._title}: {share:.0%} of {self._total_bytes / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s")
