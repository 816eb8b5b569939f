"""An attempt's messages, and the groups into which equal answers divide the ranks."""

from __future__ import annotations

import io
import json
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reprise.errors import first_of

# For each rank set with common boxes, the set's digest and their content's digest.
Groups = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank tells other ranks about an attempt: values, which travel as JSON, and a payload as it is.

    * An offer says what a rank is about to save: `number` is the digest of its piece table, `groups` are the replicas
      that it compares with other ranks, and the payload is the compressed table, if rank 0 does not have it.
    * "Opened" is rank 0's answer to all offers: the ranks may write the iteration `number`. Without a number, the
      attempt is decided already. `groups` are the ranks with different replicas; see `raise_difference`.
    * A report says how many bytes a rank has written, without headers: ranks on a host write for each other, so only
      the sum over all ranks equals the pieces' bytes. The payload is the digests for all blocks, in table order.
    * "Files" are what the other hosts' leaders prepare. They answer with "prepared", and their copies' status.
    * A decision has the checkpoint's iteration, and as its payload the order for copying local checkpoints.
    * "Stripes" have a payload alone; see `LocalRanks`.

    Args:
        problem: The sender's failure, or the attempt's. None without a failure.
        number: Below 2^64. If it is the only value, it travels in 8 bytes, since most messages are like this.
        groups: See `ReplicaDigests.groups` and `differing_sides`.
    """

    problem: str | None = None
    number: int | None = None
    groups: Groups = ()
    payload: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the message."""
        if self.number is not None and self.problem is None and not self.groups:
            return b"\n" + self.number.to_bytes(8) + self.payload
        return json.dumps([self.problem, self.number, self.groups]).encode() + b"\n" + self.payload

    @staticmethod
    def from_bytes(data: bytes) -> Message:
        """Parse a message."""
        values, _, payload = data.partition(b"\n")
        if values:
            problem, number, groups = json.loads(values)
            return Message(problem, number, groups, payload)
        return Message(number=int.from_bytes(payload[:8]), payload=payload[8:])


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Return the message with these files, given by name in write order."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def unpack_files(message: bytes) -> dict[str, bytes]:
    """Return a message's files."""
    with zipfile.ZipFile(io.BytesIO(message)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sides_of(answers: Mapping[int, object]) -> list[list[int]]:
    """Group ascending ranks by equal answers, the lowest rank's side first."""
    sides = defaultdict[object, list[int]](list)
    for rank in sorted(answers):
        sides[answers[rank]].append(rank)
    return list(sides.values())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words, numbering at most the first eight."""
    return f"rank{'s' * (len(ranks) > 1)} {first_of(ranks, 8)}"
