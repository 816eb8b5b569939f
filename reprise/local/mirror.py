"""The mirror of a run whose hosts share no folder: they upload each local checkpoint together, as whole files.

It is `reprise.stores.mirror`, started as `python -m reprise.local.mirror`, with the other hosts as its pool. Host 0
chooses a checkpoint. All hosts hold it, so that retention leaves it, until it is in the store. Each uploads its share
of the files, and takes what it lacks of them from the hosts that have it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.format.mirror_record import SCRATCH, iteration_in
from reprise.local.assembled import AssembledSource
from reprise.local.host_part import HostPart, HostParts
from reprise.local.part_client import PartClient
from reprise.local.part_server import PartServer
from reprise.local.survey import Candidate, PartSummary
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder, iteration_name
from reprise.stores import mirror
from reprise.stores.mirror import MirrorOptions
from reprise.stores.peers import Peers
from reprise.stores.pool import Pool

# A host names a checkpoint at its commit, moments after host 0: one that is on no host for so long is lost.
_LOST_S = 30.0


class HostPool(Pool):
    """The hosts of a run, seen from one of them."""

    def __init__(
        self,
        parts: HostParts,
        server: PartServer,
        client: PartClient,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts, self._server, self._client, self._clock = parts, server, client, clock
        self.wake = server.wake
        self._scratch = parts.folder.root / SCRATCH
        self._is_released = False  # an earlier process may have chosen one
        self._lacking_since = dict[tuple[str, str], float]()
        parts.folder.files.remove_tree(self._scratch)

    @property
    def chosen(self) -> str:
        return "" if self._parts.chosen is None else iteration_name(self._parts.chosen[0])

    @property
    def is_over(self) -> bool:
        return self._server.is_over

    def hold(self, name: str, digest: str) -> bool:
        self._is_released = False
        own, lacks = self._parts.hold(iteration_in(name), digest), "damaged files of this host"
        if own is not None:
            parts, silent = self._client.parts(own, order="hold")
            lacks = _describe_missing(own, parts.values())
            if lacks and silent:
                raise next(iter(silent.values()))
        if not lacks:
            self._lacking_since.clear()
            return True
        since = self._lacking_since.setdefault((name, digest), self._clock())
        if self._clock() - since > _LOST_S:
            raise CheckpointError(
                "A local checkpoint is not whole on the hosts of the run",
                where=self._parts.folder.root / name,
                expected="every piece",
                found=f"without {lacks}",
                fix="Later ones go on.",
            )
        return False

    def release(self) -> None:
        if not self._is_released:
            self._parts.release()
            self._is_released = self._client.tell("release")  # else the next call tells them again

    def source(self, path: Path) -> AssembledSource:
        def find() -> HostPart | None:
            chosen = self._parts.chosen
            is_chosen = chosen is not None and self._parts.folder.iteration(chosen[0]) == path
            return self._parts.find(*chosen) if chosen is not None and is_chosen else None

        return AssembledSource(path, find, self._client, self._scratch)

    def end(self) -> None:
        self._parts.release()
        if self._client.host == 0:
            self._client.tell("over")  # the others release theirs


def _describe_missing(own: HostPart, parts: Collection[PartSummary]) -> str:
    """Return in words the pieces in none of these parts; empty if there are none."""
    if own.by_writer.keys() <= {number for part in parts for number in part.whole}:
        return ""  # a large checkpoint has millions of pieces to compare
    hosts = {number: part.part(own.host, own.by_writer) for number, part in enumerate(parts)}
    return Candidate(own.checkpoint.iteration, own.checkpoint.digest, hosts).describe_missing()


def main() -> int:
    """Mirror a run, with the other hosts of a line of the standard input; return the exit status."""

    def pool_of(options: MirrorOptions) -> HostPool:
        peers = Peers.read(sys.stdin.fileno())
        parts = HostParts(CheckpointFolder(options.run, FILE_SYSTEM))
        server = PartServer(parts, peers)
        server.start()
        return HostPool(parts, server, PartClient(peers, options.host))

    return mirror.main(pool_of=pool_of)


if __name__ == "__main__":
    sys.exit(main())
