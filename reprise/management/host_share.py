"""A local checkpoint's share in one host's folder, and its completeness over several hosts' folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reprise.errors import TrainerError
from reprise.format.host_file import HostFile, PieceNumbers, without
from reprise.loading.blocks import bytes_of
from reprise.loading.reader import Checkpoint, read_places
from reprise.local.parts import Parts, candidates
from reprise.local.pieces import damaged_pieces


@dataclass(frozen=True, slots=True)
class HostPieces:
    """A host's pieces, and how many a folder has.

    Args:
        host: The host name.
        pieces: How many pieces the host wrote.
        present: How many of them are in the folder.
        present_bytes: The size of the present pieces in bytes.
    """

    host: str
    pieces: int
    present: int
    present_bytes: int


@dataclass(frozen=True, slots=True)
class HostShare:
    """A local checkpoint's share in one host's folder.

    Args:
        host: The name of the host that saves to the folder. None for a folder with copies alone.
        hosts: The pieces by host.
        total_bytes: The size of all tensors in the checkpoint, in bytes.
        missing: The parts not whole in the folder, in words. Empty if there are none.
    """

    host: str | None
    hosts: tuple[HostPieces, ...]
    total_bytes: int
    missing: str

    @property
    def present_bytes(self) -> int:
        """Return the size of the pieces in the folder, in bytes."""
        return sum(pieces.present_bytes for pieces in self.hosts)

    def __str__(self) -> str:
        """Return the share in words: `50 % of 2 hosts: a; missing 1 of 2 parts: b`."""
        percent = min(99, round(100 * self.present_bytes / max(1, self.total_bytes))) if self.missing else 100
        text = f"{percent} % of {len(self.hosts)} host{'s' * (len(self.hosts) > 1)}: {self.host or 'copies alone'}"
        return f"{text}; missing {self.missing}" if self.missing else text


def share_of(checkpoint: Checkpoint) -> HostShare | None:
    """Return the checkpoint's share in its folder, or None unless it is a host's folder."""
    host = checkpoint.host
    if host is None:
        return None
    places, written, present = read_places(checkpoint), host.by_host(), host.by_host(host.held)
    pieces = [(written.get(number, {}), present.get(number, {})) for number in range(len(host.hosts))]
    return HostShare(
        host=None if host.host is None else host.hosts[host.host],
        hosts=tuple(
            HostPieces(name, _count(all_pieces), _count(held), bytes_of(checkpoint, places, held))
            for name, (all_pieces, held) in zip(host.hosts, pieces, strict=True)
        ),
        total_bytes=sum(place.spec.total_bytes for place in places.values()),
        missing=Parts.of(host).describe_missing(),
    )


def _count(pieces: PieceNumbers) -> int:
    return sum(map(len, pieces.values()))


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Return the size of the tensor data in a checkpoint folder, in bytes."""
    places = read_places(checkpoint)
    if checkpoint.host is None:
        return sum(place.spec.total_bytes for place in places.values())
    return bytes_of(checkpoint, places, checkpoint.host.held)


def without_damage(checkpoint: Checkpoint) -> HostFile | None:
    """Read all pieces in a local checkpoint. Return its `host.json` reduced to the undamaged ones."""
    if checkpoint.host is None:
        return None
    try:
        damaged = damaged_pieces(checkpoint, checkpoint.host.held)
    except TrainerError:  # a damaged header
        return None
    return replace(checkpoint.host, held=without(checkpoint.host.held, damaged))


def missing_everywhere(
    folders: Sequence[object], parts: Iterable[tuple[int | None, HostFile | None]]
) -> dict[int | None, str]:
    """Return, by iteration, the parts missing in all folders, in words. Empty if all parts are there.

    Args:
        folders: The folders. The result is empty for a single folder.
        parts: Each checkpoint's iteration and `host.json`, which a whole checkpoint lacks.
    """
    local = [{iteration: Parts.of(host)} for iteration, host in parts if iteration is not None and host is not None]
    entries = reversed(candidates(local) if len(folders) > 1 else [])  # an iteration's most complete one last
    return {candidate.iteration: candidate.together.describe_missing() for candidate in entries}
