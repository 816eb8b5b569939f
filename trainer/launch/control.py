"""Requests from users and schedulers to a running job: stop, or save now. All ranks agree on them every iteration."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.launch.signals import SignalHandler

_log = logging.getLogger(__name__)

SAVE_NOW = "save_now"
_CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ControlFlags:
    """Requests after an iteration, from a single rank, or from all ranks after they agree.

    Args:
        stop: Save and end the run.
        save: Save, and continue.
        exit_on_save_failure: End the run with an error, because too many consecutive saves have failed.
    """

    stop: bool = False
    save: bool = False
    exit_on_save_failure: bool = False

    def flags(self) -> list[bool]:
        """Return the flags as a list, to be counted over ranks along with an iteration's figures."""
        return [self.stop, self.save, self.exit_on_save_failure]

    @staticmethod
    def of(counts: Sequence[int]) -> ControlFlags:
        """Return the flags set by any rank, given rank counts per flag."""
        return ControlFlags(*(count > 0 for count in counts))


@dataclass(frozen=True, slots=True)
class ControlRules:
    """When a run ends or saves. 0 means never.

    Args:
        exit_interval: End at multiples of this iteration.
        exit_duration_in_mins: End after this many minutes.
        save_interval_mins: Save once this many minutes have passed since the last save.
        exit_on_save_failure: End after this many consecutive failed saves.
    """

    exit_interval: int = 0
    exit_duration_in_mins: float = 0.0
    save_interval_mins: float = 0.0
    exit_on_save_failure: int = 0


class RunControl:
    """Requests to a rank. Only rank 0 reads the clock and the files, because ranks could see them differ.

    Args:
        folder: The checkpoint folder, where a file named `save_now` requests a save. None without saves.
    """

    def __init__(
        self,
        rules: ControlRules,
        signals: SignalHandler | None,
        *,
        rank: int,
        folder: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._signals, self._rank, self._clock = rules, signals, rank, clock
        self._file = None if folder is None else folder / SAVE_NOW
        self._started = self._saved = clock()
        self._checked_at = clock() - _CHECK_INTERVAL_S
        self._is_touched = False
        self._ignored: tuple[int, int] | None = None

    def begin(self) -> None:
        """Start the save interval before the first iteration, and tell the signal handler about the loop."""
        if self._signals is not None:
            self._signals.await_iteration()
        self._saved = self._clock()

    def now(self, *, failed_saves: int = 0) -> ControlFlags:
        """Return the requests to this rank, given the number of consecutive failed saves."""
        has_failed = 0 < self._rules.exit_on_save_failure <= failed_saves
        if self._rank:
            return ControlFlags(stop=self.is_signalled(), exit_on_save_failure=has_failed)
        now = self._clock()
        duration, interval = self._rules.exit_duration_in_mins, self._rules.save_interval_mins
        is_over = 0 < 60 * duration <= now - self._started
        is_due = 0 < 60 * interval <= now - self._saved
        return ControlFlags(self.is_signalled() or is_over, is_due or self._is_file_touched(now), has_failed)

    def saving(self) -> None:
        """Restart the save interval at a save, and clear the requests for it."""
        self._saved = self._clock()
        if self._is_touched and self._file is not None:
            self._is_touched = False
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:  # a request must not repeat every second
                self._ignore(f"it cannot be removed: {error.strerror}")

    def exits_after(self, iteration: int) -> bool:
        """Return whether `train.exit_interval` ends the run after `iteration`."""
        return self._rules.exit_interval > 0 and iteration % self._rules.exit_interval == 0

    def reason(self, iteration: int) -> str:
        """Return why the job ends after `iteration`, as far as this rank knows."""
        if self._signal is not None:
            return self._signal
        if self.exits_after(iteration):
            return f"train.exit_interval={self._rules.exit_interval}"
        return "its time limit is reached, or another rank was asked to stop"

    def is_signalled(self) -> bool:
        """Return whether this rank has received a signal."""
        return self._signal is not None

    @property
    def _signal(self) -> str | None:
        return None if self._signals is None else self._signals.name

    def _is_file_touched(self, now: float) -> bool:
        if self._file is not None and now - self._checked_at >= _CHECK_INTERVAL_S and not self._is_touched:
            self._checked_at = now
            with contextlib.suppress(OSError):
                status = self._file.lstat()
                is_new = _identity(status) != self._ignored
                if is_new and stat.S_ISDIR(status.st_mode):
                    self._ignore("it is a folder; a file of this name requests a save")
                self._is_touched = is_new and not stat.S_ISDIR(status.st_mode)
        return self._is_touched

    def _ignore(self, reason: str) -> None:
        """Ignore the current file until it is touched or replaced."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._ignored = _identity(self._file.lstat())
                _log.warning("%s is ignored: %s", self._file, reason)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns
