"""The messages of a rank on an attempt: its offer before the save, and its report once its part is written."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# Has failed, iteration, identity, digest of the table of pieces, the view of the folder, groups of replicas.
_OFFER = struct.Struct("<?IQQQH")
_GROUP = struct.Struct("<QIQQ")
_REPORT = struct.Struct("<?Q")  # has failed, bytes written


@dataclass(frozen=True, slots=True)
class GroupDigest:
    """Digests (xxh3-64) of everything replicated by this rank and a group of ranks.

    Args:
        ranks: digest of the group's rank numbers, this rank included.
        size: number of ranks in the group.
        boxes: digest of the names and boxes of the tensors.
        content: digest of the tensors' bytes when the save began.
    """

    ranks: int
    size: int
    boxes: int
    content: int

    def to_bytes(self) -> bytes:
        """Return the row of a message."""
        return _GROUP.pack(self.ranks, self.size, self.boxes, self.content)

    @staticmethod
    def all_of(rows: bytes) -> tuple[GroupDigest, ...]:
        """Return the groups in a message."""
        return tuple(GroupDigest(*row) for row in _GROUP.iter_unpack(rows))


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank is about to save.

    Args:
        identity: digest of the inventory of all tensors of the checkpoint, as this rank sees it; see `Inventory`.
        groups: the replicas that this rank compares with other ranks.
        pieces: digest of the table of its pieces; see `joint_plan.encode`.
        view: identity of the checkpoint folder on this host; see `shared_folder.view_of`.
        table: the table itself, compressed; empty if it is not sent.
        problem: the reason why this rank saves nothing, or None.
    """

    iteration: int
    identity: int = 0
    groups: tuple[GroupDigest, ...] = ()
    pieces: int = 0
    view: int = 0
    table: bytes = b""
    problem: str | None = None

    def to_bytes(self) -> bytes:
        """Return the message."""
        has_failed = self.problem is not None
        head = _OFFER.pack(has_failed, self.iteration, self.identity, self.pieces, self.view, len(self.groups))
        rows = b"".join(group.to_bytes() for group in self.groups)
        return head + rows + (self.table if self.problem is None else self.problem.encode())

    @staticmethod
    def from_bytes(data: bytes) -> Offer:
        """Return the offer in a message."""
        has_failed, iteration, identity, pieces, view, count = _OFFER.unpack_from(data)
        at = _OFFER.size + count * _GROUP.size
        groups, payload = GroupDigest.all_of(data[_OFFER.size : at]), data[at:]
        if has_failed:
            return Offer(iteration, identity, groups, pieces, view, problem=payload.decode())
        return Offer(iteration, identity, groups, pieces, view, payload)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank has written.

    Args:
        problem: the reason why this rank failed, or None.
        written_bytes: bytes written by this rank, without headers.
        digests: the digests of all blocks of its pieces, in the order of its table.
    """

    problem: str | None = None
    written_bytes: int = 0
    digests: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the message."""
        head = _REPORT.pack(self.problem is not None, self.written_bytes)
        return head + (self.digests if self.problem is None else self.problem.encode())

    @staticmethod
    def from_bytes(data: bytes) -> RankReport:
        """Return the report in a message."""
        has_failed, written_bytes = _REPORT.unpack_from(data)
        payload = data[_REPORT.size :]
        return RankReport(payload.decode()) if has_failed else RankReport(None, written_bytes, payload)
