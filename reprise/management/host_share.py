"""The share of a local checkpoint in the folder of one host, and the checkpoint in the folders of several hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reprise.errors import TrainerError
from reprise.format.host_file import HostFile, missing, without
from reprise.loading.blocks import bytes_of
from reprise.loading.reader import Checkpoint, read_places
from reprise.local.pieces import damaged_pieces
from reprise.local.survey import candidates, describe


@dataclass(frozen=True, slots=True)
class HostPieces:
    """The pieces of tensors written by a host, as far as they lie in a folder.

    Args:
        host: the name of the host.
        pieces: the number of pieces written by the host.
        present: the number of these pieces in the folder.
        present_bytes: their size in bytes.
    """

    host: str
    pieces: int
    present: int
    present_bytes: int


@dataclass(frozen=True, slots=True)
class HostShare:
    """The share of a local checkpoint in the folder of one host.

    Args:
        host: the name of the host with the folder's saves; None for a folder of copies alone.
        hosts: the pieces of each host of the checkpoint.
        total_bytes: the size of all tensors of the checkpoint, in bytes.
        missing: the pieces outside the folder, in words; empty if there are none.
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
        """Return the share in words: `50 % of 2 hosts: a; missing 3 of 3 pieces of host b (weight, ...)`."""
        percent = min(99, round(100 * self.present_bytes / max(1, self.total_bytes))) if self.missing else 100
        text = f"{percent} % of {len(self.hosts)} host{'s' * (len(self.hosts) > 1)}: {self.host or 'copies alone'}"
        return f"{text}; missing {self.missing}" if self.missing else text


def share_of(checkpoint: Checkpoint) -> HostShare | None:
    """Return the share of a checkpoint in its folder; None for a folder of another kind than a host's."""
    host = checkpoint.host
    if host is None:
        return None
    return HostShare(
        host=None if host.host is None else host.hosts[host.host],
        hosts=tuple(_pieces_of(checkpoint, host, number) for number in range(len(host.hosts))),
        total_bytes=sum(place.spec.total_bytes for place in read_places(checkpoint).values()),
        missing=describe(missing(host.writers, [host.held]), host),
    )


def _pieces_of(checkpoint: Checkpoint, host: HostFile, number: int) -> HostPieces:
    pieces_of_host = host.written_by(number)
    present = without(pieces_of_host, without(pieces_of_host, host.held))
    pieces, count = (sum(map(len, numbers.values())) for numbers in (pieces_of_host, present))
    return HostPieces(host.hosts[number], pieces, count, bytes_of(checkpoint, read_places(checkpoint), present))


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Return the size of the tensors, or pieces of tensors, in a checkpoint's folder, in bytes."""
    places = read_places(checkpoint)
    if checkpoint.host is None:
        return sum(place.spec.total_bytes for place in places.values())
    return bytes_of(checkpoint, places, checkpoint.host.held)


def without_damage(checkpoint: Checkpoint) -> HostFile | None:
    """Return the `host.json` of a local checkpoint with its undamaged pieces alone; reads all pieces."""
    if checkpoint.host is None:
        return None
    try:
        damaged = damaged_pieces(checkpoint, read_places(checkpoint), checkpoint.host.held)
    except TrainerError:  # a header
        return None
    return replace(checkpoint.host, held=without(checkpoint.host.held, damaged))


def missing_everywhere(
    folders: Sequence[object], parts: Iterable[tuple[int | None, HostFile | None]]
) -> dict[int | None, str]:
    """Return by iteration the pieces missing in all of several folders, in words; empty if all pieces are there.

    Args:
        folders: the given folders; nothing is returned for a single folder.
        parts: the iteration and the `host.json` of each checkpoint; a whole checkpoint has none.
    """
    texts: dict[int | None, str] = {}
    local = [{iteration: host} for iteration, host in parts if iteration is not None and host is not None]
    for candidate in candidates(local) if len(folders) > 1 else ():
        texts.setdefault(candidate.iteration, candidate.describe_missing())
    return texts
