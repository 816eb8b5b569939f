"""Copies a host's saves to the next hosts of the ring, in the background, once the checkpoint is committed.

Rank 0 starts the copies of a checkpoint with its decision to commit it, if every host is through with the copies
before; otherwise a later checkpoint is copied. The newest checkpoint copied everywhere stays on every host: a lost disk
costs the iterations since then.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing

from reprise.commit.attempt import Attempt, Hosts
from reprise.commit.channel import StoreChannel
from reprise.errors import LaunchError, TrainerError
from reprise.loading.reader import Checkpoint, open_checkpoint, read_places
from reprise.local.link import Link
from reprise.local.pieces import PieceWriter
from reprise.storage.worker import Job, Worker

_log = logging.getLogger(__name__)

_MOST_LISTED = 16  # newest iterations in a status, beside the one that is copied everywhere
# How long the end of a run waits for copies that are under way.
_CLOSE_S = 20.0


class Copies:
    """The copies between the hosts of a run, on a rank; only leaders copy. Implements `Copying`.

    Args:
        count: the number of hosts after its own with a copy of a host's saves.
        timeout_s: how long a side waits for the other.
    """

    def __init__(self, channel: StoreChannel, hosts: Hosts, *, nonce: str, count: int, timeout_s: float) -> None:
        self._channel, self._hosts, self._nonce, self._timeout_s = channel, hosts, nonce, timeout_s
        self._host = hosts.number_of(channel.rank)
        self.count = min(count, len(hosts.leaders) - 1)  # no host has two copies
        self._workers = {way: Worker(f"checkpoint-{way}") for way in ("send", "receive")}
        self._jobs: list[Job] = []
        self._links: dict[tuple[int, int], Link] = {}
        self._generation = 1  # of the links: all hosts open new ones after one has failed
        self._lock = threading.Lock()
        self._is_broken = False
        self._copied: set[int] = set()  # iterations of which this host has all copies
        self._safe: int | None = None  # the newest that every host has all copies of
        self._current: int | None = None
        self._loaded: int | None = None
        self.sent_bytes = 0

    @property
    def pinned(self) -> Collection[int]:
        """Return the iterations that must stay: the newest copied everywhere, and the iteration being copied.

        Before the first complete copy, the loaded iteration must stay.
        """
        safe = self._loaded if self._safe is None else self._safe
        return {number for number in (safe, self._current) if number is not None}

    def loaded(self, iteration: int) -> None:
        """Take note of the first iteration of the run, if there are copies to replace it."""
        self._loaded = iteration if self.count else None

    def found(self, iterations: Collection[int]) -> None:
        """Take note of iterations whose copies this host has from earlier."""
        with self._lock:
            self._copied.update(iterations if self.count else ())

    def rewound(self, iteration: int) -> None:
        """Forget the copies of later iterations, which the run overtakes."""
        with self._lock:
            self._copied = {number for number in self._copied if number <= iteration}

    def status(self, iteration: int) -> bytes:
        """Return the status of this host, for rank 0, in a save of `iteration`, whose earlier copies it replaces."""
        with self._lock:
            candidates = self._copied - {iteration}
            newest = sorted(candidates)[-_MOST_LISTED:]
            copied = sorted({*newest, *(candidates & {self._safe})})
            return json.dumps([self._is_busy, self._is_broken, copied]).encode()

    def decide(self, statuses: Sequence[bytes]) -> bytes:
        """Return whether to copy the checkpoint, the generation of links for it, and the newest complete copy."""
        reports = [json.loads(status) for status in statuses]
        everywhere = set.intersection(*(set(copied) for _, _, copied in reports))
        is_copied = self.count > 0 and not any(is_busy for is_busy, _, _ in reports)
        generation = self._generation + any(is_broken for _, is_broken, _ in reports)
        return json.dumps([is_copied, generation, max(everywhere, default=self._safe)]).encode()

    def committed(self, attempt: Attempt, order: bytes) -> None:
        """Begin the copies of a checkpoint, if rank 0 has decided so. Leaders only."""
        if not order:
            return
        is_copied, generation, self._safe = json.loads(order)
        if not is_copied:
            return
        with self._lock:
            if generation != self._generation:
                self._generation, self._is_broken = generation, False
                self._close_links()
            self._current = attempt.iteration
            self._copied = {number for number in self._copied if number >= (self._safe or 0)} - {attempt.iteration}
            calls = {self._workers["send"]: self._send, self._workers["receive"]: self._receive}
            self._jobs = [worker.submit(self._guarded(call, attempt, generation)) for worker, call in calls.items()]

    def wait(self, timeout_s: float) -> None:
        """Wait until no copy is under way, or for a while."""
        deadline = time.monotonic() + timeout_s
        for job in self._jobs:
            job.ends(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Wait for the copies under way and end the threads; raise the error of a defect in any of them."""
        self.wait(_CLOSE_S)
        for worker in self._workers.values():
            worker.close(0.0 if self._is_busy else _CLOSE_S)
        self._close_links()
        for job in self._jobs:
            if job.is_done:
                job.wait()

    def _fail(self, generation: int, *, sends: bool) -> None:
        """Close the links of a direction, to end the other side's wait."""
        with self._lock:
            if self._generation == generation:
                self._is_broken = True
                self._close_links(sends=sends)

    def _close_links(self, *, sends: bool | None = None) -> None:
        for source, target in list(self._links):
            if sends in (None, source == self._host):
                self._links.pop((source, target)).close()

    @property
    def _is_busy(self) -> bool:
        return not all(job.is_done for job in self._jobs)

    def _guarded(
        self, call: Callable[[Checkpoint, int], None], attempt: Attempt, generation: int
    ) -> Callable[[], None]:
        def run() -> None:
            path, is_done = attempt.folder.iteration(attempt.iteration), False
            try:
                call(open_checkpoint(path, attempt.folder.files), generation)
                is_done = True
            except (TrainerError, OSError) as error:
                problem = str(error).rstrip(".")
                _log.error("iteration %d is not copied: %s. The next save copies again", attempt.iteration, problem)
            finally:
                if not is_done:
                    self._fail(generation, sends=call == self._send)

        return run

    def _send(self, checkpoint: Checkpoint, generation: int) -> None:
        assert checkpoint.host is not None
        start, pieces, hosts = time.perf_counter(), checkpoint.host.own, self._hosts.names
        places = read_places(checkpoint)
        for step in range(1, self.count + 1):
            target = (self._host + step) % len(hosts)
            sent_bytes = self._link(self._host, target, generation).send(checkpoint, places, pieces)
            self.sent_bytes += sent_bytes
            seconds = time.perf_counter() - start
            size = f"{sent_bytes / 1e6:.1f} MB"
            _log.info("copied iteration %d to %s, %s, %.2f s", checkpoint.iteration, hosts[target], size, seconds)

    def _receive(self, checkpoint: Checkpoint, generation: int) -> None:
        assert checkpoint.host is not None
        places, damage = read_places(checkpoint), list[str]()
        with closing(PieceWriter(checkpoint)) as writer:
            for step in range(1, self.count + 1):
                source = (self._host - step) % len(self._hosts.names)
                pieces = checkpoint.host.written_by(source)
                self._link(source, self._host, generation).receive(writer, checkpoint, places, pieces)
                writer.finish(pieces)
                damage += [f"{problem} from {self._hosts.names[source]}" for problem in writer.damage[len(damage) :]]
        if damage:
            first = f"{damage[0]}{f', and {len(damage) - 1} more' if len(damage) > 1 else ''}"
            _log.error("iteration %d arrived damaged and is not fully copied: %s", checkpoint.iteration, first)
            return
        with self._lock:
            self._copied.add(checkpoint.iteration)

    def _link(self, source: int, target: int, generation: int) -> Link:
        """Return the link between two hosts, opened with the first copy of a generation."""
        with self._lock:
            if generation != self._generation:
                raise LaunchError("A link between two hosts is given up", where=f"generation {generation}")
            link = self._links.get((source, target))
        if link is None:
            name = f"{self._nonce}/{generation}/{source}-{target}"
            sends = source == self._host
            link = Link(self._channel, name, sends=sends, timeout_s=self._timeout_s)
            with self._lock:
                self._links[source, target] = link
        return link
