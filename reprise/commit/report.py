"""A rank's messages on an attempt: its offer before the save, and its report once its part is written."""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reprise.errors import CheckpointError

# Has failed, iteration, piece table digest, folder identity, replica group count.
_OFFER = struct.Struct("<?IQQH")
_GROUP = struct.Struct("<QQ")
_REPORT = struct.Struct("<?Q")  # has failed, bytes written

Groups = Mapping[int, int]


def pack_groups(groups: Groups) -> bytes:
    """Return replica groups as a message."""
    return b"".join(itertools.starmap(_GROUP.pack, groups.items()))


def unpack_groups(data: bytes) -> dict[int, int]:
    """Parse replica groups from a message."""
    return dict(_GROUP.iter_unpack(data))


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank is about to save.

    Args:
        pieces: Its piece table's digest; see `joint_plan.encode`.
        view: The checkpoint folder's identity on this host; see `shared_folder.view_of`.
        groups: The replicas that this rank compares with other ranks; see `ReplicaDigests.groups`.
        table: The compressed table. Empty if it is not sent.
        problem: Why this rank saves nothing, or None.
    """

    iteration: int
    pieces: int = 0
    view: int = 0
    groups: Groups = field(default_factory=dict)
    table: bytes = b""
    problem: str | None = None

    def to_bytes(self) -> bytes:
        """Return the message."""
        head = _OFFER.pack(self.problem is not None, self.iteration, self.pieces, self.view, len(self.groups))
        return head + pack_groups(self.groups) + (self.table if self.problem is None else self.problem.encode())

    @staticmethod
    def from_bytes(data: bytes) -> Offer:
        """Parse an offer."""
        has_failed, iteration, pieces, view, count = _OFFER.unpack_from(data)
        at = _OFFER.size + count * _GROUP.size
        groups, payload = unpack_groups(data[_OFFER.size : at]), data[at:]
        if has_failed:
            return Offer(iteration, pieces, view, groups, problem=payload.decode())
        return Offer(iteration, pieces, view, groups, payload)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank has written.

    Args:
        problem: Why this rank failed, or None.
        written_bytes: Bytes written by this rank, without headers.
        digests: The digests for all blocks in its pieces, in table order.
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
        """Parse a report."""
        has_failed, written_bytes = _REPORT.unpack_from(data)
        payload = data[_REPORT.size :]
        return RankReport(payload.decode()) if has_failed else RankReport(None, written_bytes, payload)


def require_readiness(offers: Mapping[int, Offer]) -> None:
    """Refuse a save, given the offers by rank, if a rank saves nothing or ranks save different iterations.

    Raises:
        CheckpointError: Has the first rank's reason, or the iterations and the ranks.
    """
    for rank in sorted(offers):
        if (problem := offers[rank].problem) is not None:
            raise CheckpointError(f"Rank {rank}: {problem}".rstrip("."))
    sides = sides_of({rank: offer.iteration for rank, offer in offers.items()})
    if len(sides) > 1:
        raise CheckpointError(
            "The ranks save different iterations",
            expected="the same iteration on every rank",
            found="; ".join(f"iteration {offers[side[0]].iteration} on {ranks_text(side)}" for side in sides),
            fix="Nothing was saved. Give all ranks the same iteration.",
        )


def sides_of(answers: Mapping[int, object]) -> list[list[int]]:
    """Group ascending ranks by equal answers, the lowest rank's side first."""
    sides = defaultdict[object, list[int]](list)
    for rank in sorted(answers):
        sides[answers[rank]].append(rank)
    return list(sides.values())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words, numbering at most the first eight."""
    text = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
