"""The share of a local checkpoint in the folder of one host, and the checkpoint in the folders of several hosts."""

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
        missing: the parts not whole in the folder, in words; empty if there are none.
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
    """Return the share of a checkpoint in its folder; None for a folder of another kind than a host's."""
    host = checkpoint.host
    if host is None:
        return None
    places, written, present = read_places(checkpoint), host.by_host(), host.by_host(host.held)

    def pieces_of(number: int) -> HostPieces:
        held = present.get(number, {})
        return HostPieces(
            host.hosts[number], _count(written.get(number, {})), _count(held), bytes_of(checkpoint, places, held)
        )

    return HostShare(
        host=None if host.host is None else host.hosts[host.host],
        hosts=tuple(map(pieces_of, range(len(host.hosts)))),
        total_bytes=sum(place.spec.total_bytes for place in places.values()),
        missing=Parts.of(host).describe_missing(),
    )


def _count(pieces: PieceNumbers) -> int:
    return sum(map(len, pieces.values()))


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
        damaged = damaged_pieces(checkpoint, checkpoint.host.held)
    except TrainerError:  # a header
        return None
    return replace(checkpoint.host, held=without(checkpoint.host.held, damaged))


def missing_everywhere(
    folders: Sequence[object], parts: Iterable[tuple[int | None, HostFile | None]]
) -> dict[int | None, str]:
    """Return by iteration the parts missing in all of several folders, in words; empty if all parts are there.

    Args:
        folders: the given folders; nothing is returned for a single folder.
        parts: the iteration and the `host.json` of each checkpoint; a whole checkpoint has none.
    """
    texts: dict[int | None, str] = {}
    local = [{iteration: Parts.of(host)} for iteration, host in parts if iteration is not None and host is not None]
    for candidate in candidates(local) if len(folders) > 1 else ():
        texts.setdefault(candidate.iteration, candidate.together.describe_missing())
    return texts
