"""Requests from users and schedulers to a running job: stop, or save now. All ranks agree on them every iteration."""

from __future__ import annotations

import time
from typing import NamedTuple

from trainer.config.schema import Config
from trainer.launch.signals import SignalHandler


class ControlFlags(NamedTuple):
    """Requests after an iteration, from a single rank, or from all ranks after they agree.

    Args:
        stop: Save and end the run.
        save: Save, and continue.
        exit_on_save_failure: End the run with an error, because too many consecutive saves have failed.
    """

    stop: bool = False
    save: bool = False
    exit_on_save_failure: bool = False


class RunControl:
    """Requests to a rank. Only rank 0 reads the clock, because ranks could see it differ."""

    def __init__(self, config: Config, signals: SignalHandler, *, rank: int) -> None:
        self._config, self._signals, self._rank = config, signals, rank
        self._started = self._saved = time.monotonic()

    def begin(self) -> None:
        """Start the save interval before the first iteration, and tell the signal handler about the loop."""
        self._signals.await_iteration()
        self._saved = time.monotonic()

    def now(self, *, failed_saves: int = 0) -> ControlFlags:
        """Return the requests to this rank, given the number of consecutive failed saves."""
        train, checkpoint = self._config.train, self._config.checkpoint
        has_failed = 0 < checkpoint.exit_on_save_failure <= failed_saves
        if self._rank:
            return ControlFlags(stop=self.is_signalled(), exit_on_save_failure=has_failed)
        now = time.monotonic()
        is_over = 0 < 60 * train.exit_duration_in_mins <= now - self._started
        is_due = 0 < 60 * checkpoint.save_interval_mins <= now - self._saved
        return ControlFlags(self.is_signalled() or is_over, is_due, has_failed)

    def saving(self) -> None:
        """Restart the save interval at a save."""
        self._saved = time.monotonic()

    def exits_after(self, iteration: int) -> bool:
        """Return whether `train.exit_interval` ends the run after `iteration`."""
        interval = self._config.train.exit_interval
        return interval > 0 and iteration % interval == 0

    def reason(self, iteration: int) -> str:
        """Return why the job ends after `iteration`, as far as this rank knows."""
        if self._signals.name is not None:
            return self._signals.name
        if self.exits_after(iteration):
            return f"train.exit_interval={self._config.train.exit_interval}"
        return "its time limit is reached, or another rank was asked to stop"

    def is_signalled(self) -> bool:
        """Return whether this rank has received a signal."""
        return self._signals.name is not None
