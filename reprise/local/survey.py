"""What the hosts of a run hold: which local checkpoints are whole together, and what the others lack. Pure."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprise.format.host_file import HostFile, PieceNumbers, missing, union, without
from reprise.format.manifest import digest_of

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A `host.json` in a size that does not grow with the hosts, for rank 0.

    Args:
        division: digest of the hosts and writers, which are equal in all parts of a checkpoint.
        whole: the numbers of the hosts of the save all of whose pieces are in the folder.
        others: the pieces of other hosts in the folder.
    """

    attempt: str
    manifest: str
    host: int | None
    division: str
    whole: tuple[int, ...]
    others: PieceNumbers

    @staticmethod
    def of(part: HostFile) -> PartSummary:
        """Return the summary of a part."""
        by_writer = part.by_writer()
        whole = tuple(number for number, pieces in by_writer.items() if not without(pieces, part.held))
        others = without(part.held, union(by_writer[number] for number in whole))
        text = json.dumps([part.hosts, part.writers])
        return PartSummary(part.attempt, part.manifest, part.host, digest_of(text.encode()), whole, others)

    def part(self, division: HostFile, by_writer: Mapping[int, PieceNumbers]) -> HostFile:
        """Return the part.

        Args:
            division: a part with the same division.
            by_writer: its `HostFile.by_writer`.
        """
        held = union([*(by_writer[number] for number in self.whole), self.others])
        return HostFile(self.attempt, self.manifest, self.host, division.hosts, division.writers, held)

    def row(self) -> list[object]:
        """Return the JSON form."""
        return [self.attempt, self.manifest, self.host, self.division, self.whole, self.others]

    @staticmethod
    def from_row(row: Sequence[Any]) -> PartSummary:
        """Return the summary of a JSON form."""
        attempt, manifest, host, division, whole, others = row
        numbers = {name: tuple(members) for name, members in others.items()}
        return PartSummary(attempt, manifest, host, division, tuple(whole), numbers)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A local checkpoint with a part on some host.

    Args:
        manifest: digest of its manifest, the same in every part.
        parts: by number of a host of this run, its `host.json`.
        intact: those of these hosts with intact JSON files and headers.
    """

    iteration: int
    manifest: str
    parts: Mapping[int, HostFile]
    intact: frozenset[int] = frozenset()

    @property
    def writers(self) -> PieceNumbers:
        """Return the host of each piece at the save."""
        return next(iter(self.parts.values())).writers

    @property
    def missing(self) -> dict[str, tuple[int, ...]]:
        """Return the pieces on no host."""
        return missing(self.writers, [host.held for host in self.parts.values()])

    def describe_missing(self) -> str:
        """Return in words the pieces on no host, by their host at the save; empty if there are none."""
        return describe(self.missing, next(iter(self.parts.values())))


def describe(numbers: PieceNumbers, host: HostFile) -> str:
    """Return pieces in words: how many, by their host at the save, and the first tensors; empty for none."""
    count = Counter(host.writers[name][number] for name, members in numbers.items() for number in members)
    if not count:
        return ""
    total = Counter(writer for writers in host.writers.values() for writer in writers)
    of_hosts = ", ".join(f"{n} of {total[writer]} pieces of host {host.hosts[writer]}" for writer, n in count.items())
    names = list(numbers)[:_MOST_NAMED]
    return f"{of_hosts} ({', '.join(names)}{', ...' if len(numbers) > _MOST_NAMED else ''})"


def candidates(
    host_files: Sequence[Mapping[int, HostFile]], damaged: Collection[tuple[int, int]] = ()
) -> list[Candidate]:
    """Return the checkpoints of which parts were found, the newest first.

    Parts belong together if their manifests are equal. Of two checkpoints of an iteration the more complete is first.

    Args:
        host_files: by number of the host, then by iteration.
        damaged: hosts and iterations with damaged JSON files or headers.
    """
    parts: dict[tuple[int, str], dict[int, HostFile]] = {}
    for number, by_iteration in enumerate(host_files):
        for iteration, host in by_iteration.items():
            parts.setdefault((iteration, host.manifest), {})[number] = host
    checkpoints = [
        Candidate(iteration, manifest, hosts, frozenset(n for n in hosts if (n, iteration) not in damaged))
        for (iteration, manifest), hosts in parts.items()
    ]
    return sorted(checkpoints, key=lambda c: (-c.iteration, sum(map(len, c.missing.values())), c.manifest))


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pieces for host `target` from host `source`, both by number."""

    source: int
    target: int
    pieces: PieceNumbers


def assign(
    needs: Sequence[PieceNumbers], host_files: Mapping[int, HostFile]
) -> tuple[list[Transfer], list[dict[str, tuple[int, ...]]]]:
    """Return the transfers, and by host the pieces on no host.

    Of several hosts with a piece, the sender is the host with the fewest pieces to send so far.

    Args:
        needs: by number of the host, the pieces missing on it.
        host_files: by number of the host, its `host.json`.
    """
    holders: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, host in host_files.items() if any(needs) else ():
        for name, members in host.held.items():
            for piece in members:
                holders[name, piece].append(number)
    load: Counter[int] = Counter()
    routes: dict[tuple[int, int], dict[str, list[int]]] = {}
    absent: list[dict[str, tuple[int, ...]]] = []
    for target, pieces in enumerate(needs):
        lacking: dict[str, list[int]] = {}
        for name, members in pieces.items():
            for piece in members:
                sources = [number for number in holders[name, piece] if number != target]
                if not sources:
                    lacking.setdefault(name, []).append(piece)
                    continue
                source = min(sources, key=lambda number: (load[number], number))
                load[source] += 1
                routes.setdefault((source, target), {}).setdefault(name, []).append(piece)
        absent.append({name: tuple(members) for name, members in lacking.items()})
    transfers = [
        Transfer(source, target, {name: tuple(members) for name, members in pieces.items()})
        for (source, target), pieces in sorted(routes.items())
    ]
    return transfers, absent
