"""Progress callbacks for long calls."""

from __future__ import annotations

from typing import Protocol


class ProgressCallback(Protocol):
    """Called with a checkpoint or folder name, the finished work, and the total.

    Both amounts are bytes, or tensors for `diff`. Each name's first call has a `count` of 0.
    """

    def __call__(self, name: str, count: int, total: int) -> None: ...


def ignore_progress(name: str, count: int, total: int) -> None:
    """Report nothing."""
