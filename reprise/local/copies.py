"""Copies a host's part to the next hosts in the ring, in the background, after the commit.

Rank 0 starts copying a checkpoint with its commit decision, if every host has finished the previous copies; otherwise a
later checkpoint is copied. The newest checkpoint copied everywhere stays on every host: a lost disk costs the
iterations since then.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Sequence
from functools import partial

from reprise.commit.attempt import Attempt, Hosts
from reprise.errors import TrainerError
from reprise.loading.blocks import bytes_of
from reprise.loading.reader import open_checkpoint
from reprise.local.link import exchange
from reprise.local.parts import Transfer
from reprise.ranks.channel import StoreChannel
from reprise.storage.worker import Job, Worker

_log = logging.getLogger(__name__)

# How long a run's end waits for copies under way.
_CLOSE_S = 20.0


class Copies:
    """One rank's view of copies between hosts. Only leaders copy. Implements `Copying`.

    Args:
        count: How many following hosts hold a copy of each host's part.
        timeout_s: Seconds that one side waits for the other.
    """

    def __init__(self, channel: StoreChannel, hosts: Hosts, *, nonce: str, count: int, timeout_s: float) -> None:
        self._channel, self._hosts, self._nonce, self._timeout_s = channel, hosts, nonce, timeout_s
        self._host = hosts.number_of(channel.rank)
        self.count = min(count, len(hosts.leaders) - 1)  # no host holds two copies
        self._worker = Worker("checkpoint-copy")
        self._job: Job | None = None
        # Iterations with all their copies on this host. The copying thread may add one at any time. Other threads
        # replace the set, and lose at most that one.
        self._copied: set[int] = set()
        self._safe: int | None = None  # the newest iteration with all copies on every host; first the loaded one
        self._current: int | None = None

    @property
    def pinned(self) -> Collection[int]:
        """Return the iterations that must stay: the newest one copied everywhere, and the one being copied.

        Before the first complete copy, the loaded iteration must stay.
        """
        return {number for number in (self._safe, self._current) if number is not None}

    def loaded(self, iteration: int) -> None:
        """Note the run's first iteration, if copies will replace it."""
        self._safe = iteration if self.count else None

    def found(self, iterations: Collection[int]) -> None:
        """Note iterations whose copies this host has from earlier."""
        self._copied |= set(iterations if self.count else ())

    def rewound(self, iteration: int) -> None:
        """Forget copies of later iterations, which the run overtakes."""
        self._copied = {number for number in set(self._copied) if number <= iteration}

    def status(self, iteration: int) -> bytes:
        """Return this host's status for rank 0 in a save, which replaces the iteration's earlier copies."""
        is_busy = self._job is not None and not self._job.is_done
        return json.dumps([is_busy, sorted(self._copied - {iteration})]).encode()

    def decide(self, statuses: Sequence[bytes]) -> bytes:
        """Return whether to copy the checkpoint, and the newest complete copy."""
        busy, copied = zip(*map(json.loads, statuses), strict=True)
        is_copied, everywhere = self.count > 0 and not any(busy), set.intersection(*map(set, copied))
        return json.dumps([is_copied, max(everywhere, default=self._safe)]).encode()

    def committed(self, attempt: Attempt, order: bytes) -> None:
        """Start copying a checkpoint, if rank 0 has decided so. Leaders only."""
        is_copied, self._safe = json.loads(order) if order else (False, self._safe)
        if not is_copied:
            return
        self._current, least = attempt.iteration, self._safe or 0
        self._copied = {number for number in self._copied if number >= least} - {attempt.iteration}
        self._job = self._worker.submit(partial(self._copy, attempt))

    def wait(self, timeout_s: float) -> None:
        """Wait until no copy is under way, for at most `timeout_s`."""
        if self._job is not None:
            self._job.ends(timeout_s)

    def close(self) -> None:
        """Wait for a copy under way and end the thread. Raise an unexpected error from it."""
        self._worker.close(_CLOSE_S)
        if self._job is not None and self._job.is_done:
            self._job.wait()

    def _copy(self, attempt: Attempt) -> None:
        """Send this host's part to the next hosts, and receive those of the hosts before it."""
        start, names = time.perf_counter(), self._hosts.names
        transfers = [
            Transfer(source % len(names), (source + step) % len(names), source % len(names), 0)
            for step in range(1, self.count + 1)
            for source in (self._host, self._host - step)
        ]
        try:
            checkpoint = open_checkpoint(attempt.target, attempt.folder.files)
            assert checkpoint.host is not None
            pieces = {transfer.part: checkpoint.host.written_by(transfer.part) for transfer in transfers}
            exchange(
                self._channel,
                f"{self._nonce}/{attempt.name}",
                checkpoint,
                transfers,
                pieces,
                host=self._host,
                timeout_s=self._timeout_s,
            )
        except (TrainerError, OSError) as error:
            problem = str(error).rstrip(".")
            _log.error("iteration %d was not copied: %s. The next save tries again", attempt.iteration, problem)
            return
        self._copied.add(attempt.iteration)
        targets = ", ".join(names[transfer.target] for transfer in transfers if transfer.source == self._host)
        size, seconds = bytes_of(checkpoint, pieces[self._host]) / 1e6, time.perf_counter() - start
        _log.info("copied iteration %d to %s, %.1f MB each, %.2f s", attempt.iteration, targets, size, seconds)
