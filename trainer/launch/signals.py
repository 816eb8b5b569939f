"""Receives the signals to stop a job, on a separate thread."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

# From users and schedulers, submitit, a CPU time limit, and a closed terminal.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP)
# Launchers and terminals may send a signal twice in a row; only a later signal means "end at once".
_SECOND_S = 2.0
_EXIT_GRACE_S = 1.0


class SignalHandler:
    """Stops the run after the first signal. Ends the process on a second signal at least two seconds later.

    Python runs a signal handler only on the main thread between two instructions, and the main thread may spend minutes
    in a collective. So the interpreter writes each signal's number to a socket at once (`signal.set_wakeup_fd`), and a
    thread reads it.

    Args:
        report: Called with the reason before the process is ended.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._first: tuple[int, float] | None = None
        self._is_awaited = False
        self._is_leaving = False

    def start(self) -> None:
        """Start listening. Main thread only. A handler that is not started receives no signal."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda *_: None)  # with none, the signal would end the process
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def await_iteration(self) -> None:
        """Note: from now on the loop reads `name` after every iteration. Before, a signal ends the process."""
        self._is_awaited = True
        if self._first is not None:
            self._end(128 + self._first[0], f"received {self.name} before the first iteration")

    def leave_within(self, seconds: float) -> None:
        """Exit silently with status 1 after `seconds`, even if the process hangs, or at the next signal.

        For a process about to end with an error, while torchrun sends SIGTERM to its peers.
        """
        self._is_leaving = True
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def stop(self) -> None:
        """Stop listening. Main thread only."""
        signal.set_wakeup_fd(-1)
        self._writer.close()

    @property
    def name(self) -> str | None:
        """Return the name of the signal ending the job, or None."""
        return None if self._first is None else signal.Signals(self._first[0]).name

    def receive(self, number: int) -> None:
        """Handle a signal. Called by the listening thread."""
        now = time.monotonic()
        if number not in SIGNALS:
            return
        if self._is_leaving:
            os._exit(1)
        elif self._first is None:
            self._first = number, now
            if not self._is_awaited:
                self._end(128 + number, f"received {self.name} before the first iteration")
            threading.Thread(target=self._answer, daemon=True).start()  # a stopped terminal accepts no output
        elif now - self._first[1] >= _SECOND_S:
            self._end(128 + number, f"received {signal.Signals(number).name} after {self.name}")

    def _listen(self) -> None:
        while data := self._reader.recv(64):
            for number in data:
                self.receive(number)

    def _answer(self) -> None:
        _log.warning(f"{self.name}: the run ends after this iteration; repeat it after {_SECOND_S:.0f} s to quit now")

    def _end(self, status: int, reason: str) -> None:
        print(f"exiting at once: {reason}", file=sys.stderr, flush=True)
        reporting = threading.Thread(target=self._report, args=(reason,), daemon=True)
        reporting.start()
        reporting.join(_EXIT_GRACE_S)  # the report may hang
        os._exit(status)
