"""A background thread ending this process if another rank has failed or is lost."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from reprise.errors import LaunchError, TrainerError
from reprise.ranks import StoreChannel
from trainer.launch.environment import STORE_HOST
from trainer.launch.hangs import Activity, write_stacks

# The pause between two checks, longer with more ranks: at most some thousand store requests per second.
_CHECK_INTERVAL_S = 1.0
_PER_RANK_S = 1 / 5000
# The guard's pause, and its longest duration in a process that is not stopped.
_GUARD_EVERY_S, _STOPPED_S = 1.0, 3.0
# Time for the main thread to end on its own after a rank has failed.
_GRACE_S = 10.0
_MOST_ASKING = 512  # with more ranks only rank 0 asks which ranks are missing
_BEATS = 8  # heartbeats per timeout
_HEARTBEAT = "heartbeat"
_STORE_IS_GONE = f"The store is gone: its host, {STORE_HOST}, was killed or has ended"


class Watchdog:
    """Ends this process some seconds after a rank has failed or is lost, or the store's host is gone.

    A rank in a collective notices a dead peer only if the connection breaks, and a hung peer only when the collective
    times out. A rank waiting for a message notices neither.

    Args:
        channel: A channel for this thread only.
        timeout_s: The longest silence from the store's host, and the longest time without a rank's heartbeat, in
            seconds.
        leave: Ends the process with a status.
        activity: What the main thread is doing. Other ranks report it if this rank is lost.
        hangs: The folder for the stacks of ranks ended by the watchdog.
    """

    def __init__(
        self,
        channel: StoreChannel,
        timeout_s: float,
        *,
        leave: Callable[[int], None] = os._exit,
        activity: Activity,
        hangs: Path,
    ) -> None:
        self._activity, self._hangs = activity, hangs
        self._channel, self._timeout_s, self._leave = channel, timeout_s, leave
        self._pause_s = _CHECK_INTERVAL_S + channel.world_size * _PER_RANK_S
        self._next = (channel.rank + 1) % channel.world_size  # so each rank is checked by another
        self._looks_per_beat = max(1, int(timeout_s / _BEATS / self._pause_s))
        self._patience = math.ceil(timeout_s / self._pause_s) + self._looks_per_beat
        self._looks = self._beats = 0
        self._seen, self._seen_at = "", 0
        self._is_over = threading.Event()  # watching has ended
        self._is_ending = threading.Event()  # the main thread ends on its own
        self._looked = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start watching, if there are several ranks."""
        if self._channel.world_size > 1:
            self._looked = time.monotonic()
            self._thread.start()
            threading.Thread(target=self._guard, name="store-guard", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. From now on every rank ends on its own."""
        self._is_over.set()
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join(_GRACE_S)

    def explain(self, error: BaseException, channel: StoreChannel) -> str | None:
        """Report `error` to all ranks. Return the root cause if another rank failed first, else None.

        An error known to all ranks has no root cause on another rank. Until this call returns, the process still ends
        if the store's host hangs.

        Args:
            channel: The main thread's channel.
        """
        self._is_ending.set()
        cause, silent = channel.fail(str(error) or type(error).__name__), list[int]()
        # A lost connection or a missing message may result from another rank's end.
        if isinstance(error, dist.DistError | LaunchError) or "gloo" in str(error).lower():
            try:
                channel.failure()
                if channel.rank == 0 or channel.world_size <= _MOST_ASKING:
                    silent = channel.silent_ranks(2 * self._pause_s + 1.0)
                hung = self._hung_rank(channel, silent) if silent or cause is None else None
                if hung is not None:
                    cause = hung
                    write_stacks(self._hangs, channel.rank, hung)
            except dist.DistError:
                cause = _STORE_IS_GONE
        channel.await_others(but=silent)
        self._is_over.set()
        return None if isinstance(error, TrainerError) and error.is_known_to_all else cause

    def _hung_rank(self, channel: StoreChannel, silent: Sequence[int]) -> str | None:
        """Describe the ranks that do not answer, or else a rank in another activity than this rank, if there is one."""
        if silent:
            ranks = ", ".join(map(str, silent))
            return f"Rank {ranks} does not answer: it was killed or is hung{_last_activity(channel, silent[0])}"
        text, count = str(self._activity), channel.world_size
        for rank in range(count if count <= _MOST_ASKING else 0):
            activity = _activity_of(channel, rank)
            if rank != channel.rank and activity not in ("", text):
                return f"Rank {rank} is in {activity}, for which rank {channel.rank} waited in {text}"
        return None

    def _watch(self) -> None:
        failure: str | None = None
        leaves_at = 0.0
        while not self._is_over.wait(self._pause_s):
            try:
                failure = failure or self._channel.failure() or self._lost_rank()
                if failure is not None:
                    self._beat()
                    self._channel.answer()
            except (dist.DistError, LaunchError):
                failure = failure or _STORE_IS_GONE
            self._looked = time.monotonic()
            leaves_at = leaves_at or (0.0 if failure is None else self._looked + _GRACE_S)
            if failure is not None and self._looked >= leaves_at and not self._is_ending.is_set():
                self._say(failure)
                self._channel.fail(failure)
                self._leave(1)
                return

    def _say(self, failure: str) -> None:
        """Print why this rank ends, its activity, and where its threads' stacks are."""
        stacks = write_stacks(self._hangs, self._channel.rank, failure)
        place = "" if stacks is None else f"; the stacks of its threads: {stacks}"
        text = f"rank {self._channel.rank} exits: {failure}; it was in {self._activity}{place}"
        print(text, file=sys.stderr, flush=True)

    def _lost_rank(self) -> str | None:
        """Publish a heartbeat and check the next rank's, if they are due. Report to all ranks if that rank is lost.

        Silence is measured in this rank's own checks, not in time: stopping and continuing a whole job loses no rank.

        Returns:
            This failure, or another rank's earlier failure.

        Raises:
            LaunchError: The store is gone.
        """
        if self._looks % self._looks_per_beat == 0:
            self._beat()
            beat = self._channel.published(_HEARTBEAT, self._next)
            if beat != self._seen:
                self._seen, self._seen_at = beat, self._looks
        self._looks += 1
        if self._looks - self._seen_at <= self._patience:
            return None
        text = f"Rank {self._next} sent no heartbeat for {self._timeout_s:.0f} s: it was killed or is hung"
        text += _last_activity(self._channel, self._next)
        return self._channel.fail(text) or text

    def _beat(self) -> None:
        """Publish a heartbeat with this rank's present activity."""
        self._beats += 1
        self._channel.publish(_HEARTBEAT, f"{self._beats} {self._activity}")

    def _guard(self) -> None:
        """Exit if a store request hangs: a stopped host blocks every call, past any timeout.

        Time does not count while this process itself is stopped, alone or with all others.
        """
        looked, silent_s, before = self._looked, 0.0, time.monotonic()
        while not self._is_over.wait(_GUARD_EVERY_S):
            now = time.monotonic()
            silent_s = silent_s + min(now - before, _STOPPED_S) if looked == self._looked else 0.0
            looked, before = self._looked, now
            if silent_s > self._timeout_s:
                host = f"the store's host, {STORE_HOST},"
                self._say(f"{host} has not answered for {self._timeout_s:.0f} s: it is hung or cannot be reached")
                self._leave(1)
                return


def _last_activity(channel: StoreChannel, rank: int) -> str:
    """Return a lost rank's activity at its last heartbeat, as the end of a sentence. Empty if it sent none."""
    activity = _activity_of(channel, rank)
    return f"; at its last heartbeat it was in {activity}" if activity else ""


def _activity_of(channel: StoreChannel, rank: int) -> str:
    """Return a rank's activity at its last heartbeat, without waiting. Empty if it sent none."""
    with suppress(LaunchError):
        return channel.published(_HEARTBEAT, rank).partition(" ")[2]
    return ""
