"""Requests from users and schedulers to a running job: stop, or save now. All ranks agree on them every iteration."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from reprise.storage import is_file
from trainer.config.derived import save_folder
from trainer.config.schema import Config
from trainer.launch.signals import SignalHandler

_log = logging.getLogger(__name__)

SAVE_NOW = "save_now"
_CHECK_INTERVAL_S = 1.0


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
    """Requests to a rank. Only rank 0 reads the clock and the files, because ranks could see them differ.

    A file named `save_now` in the checkpoint folder requests a save.
    """

    def __init__(
        self,
        config: Config,
        signals: SignalHandler | None,
        *,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._signals, self._rank, self._clock = config, signals, rank, clock
        folder = save_folder(config.checkpoint)
        self._file = None if folder is None else folder / SAVE_NOW
        self._started = self._saved = clock()
        self._checked_at = clock() - _CHECK_INTERVAL_S
        self._is_requested = False

    def begin(self) -> None:
        """Start the save interval before the first iteration, and tell the signal handler about the loop."""
        if self._signals is not None:
            self._signals.await_iteration()
        self._saved = self._clock()

    def now(self, *, failed_saves: int = 0) -> ControlFlags:
        """Return the requests to this rank, given the number of consecutive failed saves."""
        train, checkpoint = self._config.train, self._config.checkpoint
        has_failed = 0 < checkpoint.exit_on_save_failure <= failed_saves
        if self._rank:
            return ControlFlags(stop=self.is_signalled(), exit_on_save_failure=has_failed)
        now = self._clock()
        is_over = 0 < 60 * train.exit_duration_in_mins <= now - self._started
        is_due = 0 < 60 * checkpoint.save_interval_mins <= now - self._saved
        return ControlFlags(self.is_signalled() or is_over, is_due or self._is_file_touched(now), has_failed)

    def saving(self) -> None:
        """Restart the save interval at a save, and clear the requests for it."""
        self._saved = self._clock()
        if self._is_requested and self._file is not None:
            self._is_requested = False
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:  # a request must not repeat every second
                _log.warning("%s is ignored from now on: it cannot be removed: %s", self._file, error.strerror)
                self._file = None

    def exits_after(self, iteration: int) -> bool:
        """Return whether `train.exit_interval` ends the run after `iteration`."""
        interval = self._config.train.exit_interval
        return interval > 0 and iteration % interval == 0

    def reason(self, iteration: int) -> str:
        """Return why the job ends after `iteration`, as far as this rank knows."""
        if self._signal is not None:
            return self._signal
        if self.exits_after(iteration):
            return f"train.exit_interval={self._config.train.exit_interval}"
        return "its time limit is reached, or another rank was asked to stop"

    def is_signalled(self) -> bool:
        """Return whether this rank has received a signal."""
        return self._signal is not None

    @property
    def _signal(self) -> str | None:
        return None if self._signals is None else self._signals.name

    def _is_file_touched(self, now: float) -> bool:
        if self._file is not None and not self._is_requested and now - self._checked_at >= _CHECK_INTERVAL_S:
            self._checked_at = now
            with contextlib.suppress(OSError):
                self._is_requested = is_file(self._file)
        return self._is_requested
