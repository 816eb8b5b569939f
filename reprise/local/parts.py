"""What the hosts hold: which local checkpoints are whole together, and who sends a part to whom. Pure.

A folder holds whole parts: its host's own, and copies from other hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reprise.format.host_file import Parts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A local checkpoint with a part in some folder.

    Args:
        folders: By folder number, its parts.
    """

    iteration: int
    folders: Mapping[int, Parts]

    @property
    def together(self) -> Parts:
        """Return the parts in all folders together."""
        manifest, hosts, _ = next(iter(self.folders.values()))
        return Parts(manifest, hosts, {number for parts in self.folders.values() for number in parts.whole})

    @property
    def problem(self) -> str:
        """Return in words what no folder has. Empty if the checkpoint is whole."""
        lacks = self.together.describe_missing()
        return f"iteration {self.iteration} lacks {lacks}" if lacks else ""


def candidates(folders: Sequence[Mapping[int, Parts]]) -> list[Candidate]:
    """Return the checkpoints with at least one part, newest first.

    Parts belong together if their manifests are equal. If an iteration has two checkpoints, the more complete one comes
    first.

    Args:
        folders: Parts by folder number, then by iteration.
    """
    groups: dict[tuple[int, str], dict[int, Parts]] = {}
    for number, by_iteration in enumerate(folders):
        for iteration, parts in by_iteration.items():
            groups.setdefault((iteration, parts.manifest), {})[number] = parts
    checkpoints = [Candidate(iteration, members) for (iteration, _), members in sorted(groups.items())]
    return sorted(checkpoints, key=lambda candidate: (-candidate.iteration, len(candidate.together.missing)))


class Transfer(NamedTuple):
    """A transfer of a part's bytes from host `source` to host `target`, all by number."""

    source: int
    target: int
    part: int
    total_bytes: int


def assign(needs: Sequence[Mapping[int, int]], folders: Mapping[int, Parts]) -> list[Transfer]:
    """Return the transfers in the order in which every host makes its own.

    If several hosts have a part, the one with the fewest bytes to send so far sends it.

    Args:
        needs: By host number, the missing bytes per part.
        folders: By host number, the parts in its folder.
    """
    load: Counter[int] = Counter()
    transfers = list[Transfer]()
    for target, sizes in enumerate(needs):
        for part, size in sizes.items():
            sources = [number for number, parts in folders.items() if part in parts.whole]
            source = min(sources, key=lambda number: (load[number], number))
            load[source] += size
            transfers.append(Transfer(source, target, part, size))
    return sorted(transfers)
