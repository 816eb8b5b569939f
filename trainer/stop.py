"""When a run ends before its last iteration. Pure."""

from __future__ import annotations


def should_exit(iteration: int, exit_interval: int) -> bool:
    """Return whether `train.exit_interval` asks to save and exit after `iteration`; 0 never does."""
    return exit_interval > 0 and iteration % exit_interval == 0
