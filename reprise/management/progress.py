"""How long calls report their progress."""

from __future__ import annotations

from typing import Protocol


class ProgressCallback(Protocol):
    """Is called with the name of the checkpoint or folder, the amount of finished work, and all of it.

    The amounts are bytes, or tensors for `diff`. Each name begins with a call whose `count` is 0.
    """

    def __call__(self, name: str, count: int, total: int) -> None: ...


def ignore_progress(name: str, count: int, total: int) -> None:
    """Report nothing."""
