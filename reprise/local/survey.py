"""What the hosts of a run hold: which local checkpoints are whole together, and what the others lack. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from reprise.format.host_file import HostFile, PieceNumbers, missing

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A local checkpoint of which some host has a part.

    Args:
        manifest: digest of its manifest, the same in every part.
        found: by number of a host of this run, its `host.json`.
        intact: those of these hosts whose JSON files and headers are not damaged.
    """

    iteration: int
    manifest: str
    found: Mapping[int, HostFile]
    intact: frozenset[int] = frozenset()

    @property
    def writers(self) -> PieceNumbers:
        """Return which host of the run that saved it wrote each piece."""
        return next(iter(self.found.values())).writers

    @property
    def missing(self) -> dict[str, tuple[int, ...]]:
        """Return the pieces that no host has."""
        return missing(self.writers, [host.held for host in self.found.values()])

    def describe_missing(self) -> str:
        """Return in words the pieces that no host has, by the host that wrote them; empty if there are none."""
        return describe(self.missing, next(iter(self.found.values())))


def describe(numbers: PieceNumbers, host: HostFile) -> str:
    """Return pieces in words: how many, by the host that wrote them, and the first tensors; empty for none."""
    count = Counter(host.writers[name][number] for name, members in numbers.items() for number in members)
    if not count:
        return ""
    total = Counter(writer for writers in host.writers.values() for writer in writers)
    of_hosts = ", ".join(f"{n} of {total[writer]} pieces of host {host.hosts[writer]}" for writer, n in count.items())
    names = list(numbers)[:_MOST_NAMED]
    return f"{of_hosts} ({', '.join(names)}{', ...' if len(numbers) > _MOST_NAMED else ''})"


def candidates(found: Sequence[Mapping[int, HostFile]], damaged: Collection[tuple[int, int]] = ()) -> list[Candidate]:
    """Return the checkpoints of which parts were found, the newest first.

    Parts belong together if their manifests are equal. Of two checkpoints of one iteration the more complete is first.

    Args:
        found: by number of the host, then by iteration.
        damaged: hosts and iterations with damaged JSON files or headers.
    """
    parts: dict[tuple[int, str], dict[int, HostFile]] = {}
    for number, by_iteration in enumerate(found):
        for iteration, host in by_iteration.items():
            parts.setdefault((iteration, host.manifest), {})[number] = host
    known = [
        Candidate(iteration, manifest, hosts, frozenset(n for n in hosts if (n, iteration) not in damaged))
        for (iteration, manifest), hosts in parts.items()
    ]
    return sorted(known, key=lambda c: (-c.iteration, sum(map(len, c.missing.values())), c.manifest))


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pieces that host `source` sends to host `target`, both by number."""

    source: int
    target: int
    pieces: PieceNumbers


def assign(
    needs: Sequence[PieceNumbers], found: Mapping[int, HostFile]
) -> tuple[list[Transfer], list[dict[str, tuple[int, ...]]]]:
    """Return who sends what, and by host the pieces that no host has.

    Of several hosts that have a piece, the one that sends the fewest so far does.

    Args:
        needs: by number of the host, the pieces that it lacks.
        found: by number of the host, its `host.json`.
    """
    held = {
        number: {(name, piece) for name, members in host.held.items() for piece in members}
        for number, host in found.items()
    }
    load: Counter[int] = Counter()
    sent: dict[tuple[int, int], dict[str, list[int]]] = {}
    left: list[dict[str, tuple[int, ...]]] = []
    for target, pieces in enumerate(needs):
        lacking: dict[str, list[int]] = {}
        for name, members in pieces.items():
            for piece in members:
                sources = [number for number in held if number != target and (name, piece) in held[number]]
                if not sources:
                    lacking.setdefault(name, []).append(piece)
                    continue
                source = min(sources, key=lambda number: (load[number], number))
                load[source] += 1
                sent.setdefault((source, target), {}).setdefault(name, []).append(piece)
        left.append({name: tuple(members) for name, members in lacking.items()})
    transfers = [
        Transfer(source, target, {name: tuple(members) for name, members in pieces.items()})
        for (source, target), pieces in sorted(sent.items())
    ]
    return transfers, left
