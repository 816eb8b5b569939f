"""Sees that no rank outlives the others: a thread looks for one that gave up or is lost, whatever the main one does."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from trainer.checkpoint.commit.channel import StoreChannel
from trainer.errors import LaunchError, TrainerError

# Between two looks, and a little more for each rank, so that the store's host is asked some thousand times a second.
_LOOK_EVERY_S = 1.0
_PER_RANK_S = 1 / 5000
# The pause of the guard, and what it takes at most where the process is not stopped.
_GUARD_EVERY_S, _STOPPED_S = 1.0, 3.0
# What the main thread gets to end by itself once a rank has given up.
_GRACE_S = 10.0
_MOST_ASKING = 512  # of more ranks only rank 0 asks who is missing
_BEATS = 8  # in the time after which a rank without any is lost


class Watchdog:
    """Ends this process some seconds after any rank has given up or was lost, or the store's host is gone.

    A rank in a collective hears of a peer that died if the connection breaks, and of one that hangs only when the
    collective times out; one that waits for a message does not hear of either.

    Args:
        channel: a channel for this thread alone.
        timeout_s: how long the store's host may not answer, and a rank may show no sign of life.
        store_host: which process that is, in words.
        leave: ends the process with a status.
    """

    def __init__(
        self,
        channel: StoreChannel,
        timeout_s: float,
        *,
        store_host: str = "rank 0",
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._channel, self._timeout_s, self._store_host, self._leave = channel, timeout_s, store_host, leave
        self._pause_s = _LOOK_EVERY_S + channel.world_size * _PER_RANK_S
        self._heartbeat = _Heartbeat(channel.clone(0.0), timeout_s, look_s=self._pause_s)
        self._is_over = threading.Event()  # nothing is looked at any more
        self._is_ending = threading.Event()  # the main thread ends by itself
        self._looked = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def start(self) -> None:
        """Begin to watch; a world of one has nobody to watch."""
        if self._channel.world_size > 1:
            self._looked = time.monotonic()
            self._thread.start()
            threading.Thread(target=self._guard, name="store-guard", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: all ranks end by themselves from now on."""
        self._is_over.set()
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join(_GRACE_S)

    def explain(self, error: BaseException, channel: StoreChannel) -> str | None:
        """Tell the others that this rank ends with `error`, and return what that follows from, if it does from another.

        What every rank knows follows from nothing, whichever of them says it first.

        Meanwhile this process still ends if the store's host hangs.

        Args:
            channel: the main thread's.
        """
        self._is_ending.set()
        cause = channel.fail(str(error) or type(error).__name__)
        silent: list[int] = []
        if _is_lost_peer(error):
            try:
                channel.failure()
                silent = self._silent_ranks(channel)
            except dist.DistError:
                cause = self._is_gone()
        if silent:
            cause = f"Rank {', '.join(map(str, silent))} does not answer: it was killed, or hangs"
        channel.await_others(but=silent)
        self._is_over.set()
        return None if isinstance(error, TrainerError) and error.is_known_to_all else cause

    def _silent_ranks(self, channel: StoreChannel) -> list[int]:
        """Return the ranks whose watch does not answer."""
        return (
            channel.silent_ranks(2 * self._pause_s + 1.0)
            if channel.rank == 0 or channel.world_size <= _MOST_ASKING
            else []
        )

    def _is_gone(self) -> str:
        return f"The store is gone: its host, {self._store_host}, was killed or has ended"

    def _watch(self) -> None:
        failure: str | None = None
        leaves_at = 0.0
        while not self._is_over.wait(self._pause_s):
            try:
                failure = failure or self._channel.failure() or self._lost_rank()
                if failure is not None:
                    self._channel.answer()
            except (dist.DistError, LaunchError):
                failure = failure or self._is_gone()
            self._looked = time.monotonic()
            leaves_at = leaves_at or (0.0 if failure is None else self._looked + _GRACE_S)
            if failure is not None and self._looked >= leaves_at and not self._is_ending.is_set():
                print(f"rank {self._channel.rank} leaves: {failure}", file=sys.stderr, flush=True)
                self._channel.fail(failure)
                self._leave(1)
                return

    def _lost_rank(self) -> str | None:
        """Tell all ranks if the next one is lost; return that, or what another rank said before."""
        lost = self._heartbeat.look()
        if lost is None:
            return None
        text = f"Rank {lost} has shown no sign of life for {self._timeout_s:.0f} s: it was killed, or hangs"
        return self._channel.fail(text) or text

    def _guard(self) -> None:
        """Leave if a look at the store hangs: a stopped host blocks every call, past any timeout.

        Time in which this process was itself stopped, alone or with all others, does not count.
        """
        looked, silent_s, before = self._looked, 0.0, time.monotonic()
        while not self._is_over.wait(_GUARD_EVERY_S):
            now = time.monotonic()
            silent_s = silent_s + min(now - before, _STOPPED_S) if looked == self._looked else 0.0
            looked, before = self._looked, now
            if silent_s > self._timeout_s:
                print(
                    f"rank {self._channel.rank} leaves: the store's host, {self._store_host}, has not answered for "
                    f"{self._timeout_s:.0f} s: it hangs, or cannot be reached",
                    file=sys.stderr,
                    flush=True,
                )
                self._leave(1)
                return


class _Heartbeat:
    """Shows that this rank lives, and sees whether the next one does, so that each is seen by one other.

    What counts is this rank's own looks, not time: a job that is stopped as a whole and goes on has lost nobody.

    Args:
        channel: one that waits for no message.
        timeout_s: after this without a sign a rank is lost.
        look_s: how often `look` is called.
    """

    def __init__(self, channel: StoreChannel, timeout_s: float, *, look_s: float) -> None:
        self._channel, self._next = channel, (channel.rank + 1) % channel.world_size
        self._looks_per_beat = max(1, int(timeout_s / _BEATS / look_s))
        self._patience = math.ceil(timeout_s / look_s) + self._looks_per_beat
        self._looks = self._beats = 0
        self._seen, self._seen_at = b"", 0

    def look(self) -> int | None:
        """Give a sign if one is due and return the next rank if it is lost.

        Raises:
            LaunchError: if the store is gone.
        """
        if self._looks % self._looks_per_beat == 0:
            self._beats += 1
            self._channel.put(f"heartbeat/{self._channel.rank}", str(self._beats).encode())
            found = self._read()
            if found != self._seen:
                self._seen, self._seen_at = found, self._looks
        self._looks += 1
        return self._next if self._looks - self._seen_at > self._patience else None

    def _read(self) -> bytes:
        try:
            return self._channel.read(f"heartbeat/{self._next}")
        except LaunchError:  # nothing hangs there yet
            return b""


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether an error may only follow from another rank's end: a lost connection, a message that never came."""
    return isinstance(error, dist.DistError | LaunchError) or "gloo" in str(error).lower()
