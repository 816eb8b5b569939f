"""Copies a host's part to the next hosts in the ring, in the background, after the commit.

Rank 0 starts copying a checkpoint with its commit decision, if every host has finished the previous copies; otherwise a
later checkpoint is copied. The newest checkpoint copied everywhere stays on every host: a lost disk costs the
iterations since then.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from functools import partial

from reprise.commit.attempt import Attempt, Hosts
from reprise.errors import TrainerError
from reprise.loading.reader import Checkpoint, open_checkpoint
from reprise.local.link import Link
from reprise.local.pieces import PieceWriter
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
        self._sending, self._receiving = Worker("checkpoint-send"), Worker("checkpoint-receive")
        self._jobs: list[Job] = []
        self._links: dict[tuple[int, int], Link] = {}
        self._generation = 1  # the links' generation: after a failure all hosts open new links
        self._is_broken = False
        # Iterations with all their copies on this host. The receiving thread may add one at any time. Other threads
        # replace the set, and lose at most that one.
        self._copied: set[int] = set()
        self._safe: int | None = None  # the newest iteration with all copies on every host
        self._current: int | None = None
        self._loaded: int | None = None

    @property
    def pinned(self) -> Collection[int]:
        """Return the iterations that must stay: the newest one copied everywhere, and the one being copied.

        Before the first complete copy, the loaded iteration must stay.
        """
        safe = self._loaded if self._safe is None else self._safe
        return {number for number in (safe, self._current) if number is not None}

    def loaded(self, iteration: int) -> None:
        """Note the run's first iteration, if copies will replace it."""
        self._loaded = iteration if self.count else None

    def found(self, iterations: Collection[int]) -> None:
        """Note iterations whose copies this host has from earlier."""
        self._copied |= set(iterations if self.count else ())

    def rewound(self, iteration: int) -> None:
        """Forget copies of later iterations, which the run overtakes."""
        self._copied = {number for number in set(self._copied) if number <= iteration}

    def status(self, iteration: int) -> bytes:
        """Return this host's status for rank 0 in a save, which replaces the iteration's earlier copies."""
        return json.dumps([self._is_busy, self._is_broken, sorted(self._copied - {iteration})]).encode()

    def decide(self, statuses: Sequence[bytes]) -> bytes:
        """Return whether to copy the checkpoint, its link generation, and the newest complete copy."""
        busy, broken, copied = zip(*map(json.loads, statuses), strict=True)
        is_copied, everywhere = self.count > 0 and not any(busy), set.intersection(*map(set, copied))
        return json.dumps([is_copied, self._generation + any(broken), max(everywhere, default=self._safe)]).encode()

    def committed(self, attempt: Attempt, order: bytes) -> None:
        """Start copying a checkpoint, if rank 0 has decided so. Leaders only."""
        is_copied, generation, self._safe = json.loads(order) if order else (False, 0, self._safe)
        if not is_copied:
            return
        if generation != self._generation:
            self._generation, self._is_broken = generation, False
            self._close_links()
        self._current, least = attempt.iteration, self._safe or 0
        self._copied = {number for number in self._copied if number >= least} - {attempt.iteration}
        calls = {self._sending: self._send, self._receiving: self._receive}
        self._jobs = [worker.submit(partial(self._copy, call, attempt)) for worker, call in calls.items()]

    def wait(self, timeout_s: float) -> None:
        """Wait until no copy is under way, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for job in self._jobs:
            job.ends(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Wait for copies under way and end the threads. Raise an unexpected error from any of them."""
        self.wait(_CLOSE_S)
        for worker in (self._sending, self._receiving):
            worker.close(0.0 if self._is_busy else _CLOSE_S)
        self._close_links()
        for job in self._jobs:
            if job.is_done:
                job.wait()

    def _close_links(self, *, sends: bool | None = None) -> None:
        """Close all links, or those in one direction, to end the other side's wait."""
        for source, target in list(self._links):
            if sends in (None, source == self._host):
                self._links.pop((source, target)).close()

    @property
    def _is_busy(self) -> bool:
        return not all(job.is_done for job in self._jobs)

    def _copy(self, call: Callable[[Checkpoint], None], attempt: Attempt) -> None:
        """Send or receive. On failure close the links in this direction: a later save opens new ones."""
        is_done = False
        try:
            call(open_checkpoint(attempt.target, attempt.folder.files))
            is_done = True
        except (TrainerError, OSError) as error:
            problem = str(error).rstrip(".")
            _log.error("iteration %d was not copied: %s. The next save tries again", attempt.iteration, problem)
        finally:
            if not is_done:
                self._is_broken = True
                self._close_links(sends=call == self._send)

    def _send(self, checkpoint: Checkpoint) -> None:
        start, hosts = time.perf_counter(), self._hosts.names
        for step in range(1, self.count + 1):
            target = (self._host + step) % len(hosts)
            sent_bytes = self._link(self._host, target).send(checkpoint)
            seconds = time.perf_counter() - start
            size = f"{sent_bytes / 1e6:.1f} MB"
            _log.info("copied iteration %d to %s, %s, %.2f s", checkpoint.iteration, hosts[target], size, seconds)

    def _receive(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.host is not None
        with closing(PieceWriter(checkpoint)) as writer:
            for step in range(1, self.count + 1):
                source = (self._host - step) % len(self._hosts.names)
                pieces = checkpoint.host.written_by(source)
                self._link(source, self._host).receive(writer, checkpoint, pieces)
                writer.finish(pieces)
        if writer.damage:
            first, more = writer.damage[0], len(writer.damage) - 1
            name = checkpoint.host.hosts[checkpoint.host.writers[first.place.spec.name][first.number]]
            others = f", and {more} more" if more else ""
            message = "iteration %d arrived damaged and is not fully copied: %s from %s%s"
            _log.error(message, checkpoint.iteration, first, name, others)
            return
        self._copied.add(checkpoint.iteration)

    def _link(self, source: int, target: int) -> Link:
        """Return the link between two hosts, which opens with a generation's first copy."""
        if (source, target) not in self._links:
            name, sends = f"{self._nonce}/{self._generation}/{source}-{target}", source == self._host
            self._links[source, target] = Link(self._channel, name, sends=sends, timeout_s=self._timeout_s)
        return self._links[source, target]
