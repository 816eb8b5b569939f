"""An attempt's messages, and the groups into which equal answers divide the ranks."""

from __future__ import annotations

import io
import json
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from reprise.errors import first_of

# For each rank set with common boxes, the set's digest and their content's digest.
Groups = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message: values by name, which travel as JSON, and a payload, which travels unchanged.

    A leader sends a plain message to rank 0 once it was asked to prepare its host's folder. The payload is its copies'
    status.

    Args:
        problem: The sender's failure, or the attempt's. None without a failure.
    """

    problem: str | None = None
    payload: bytes = b""

    # A frequent message's number below 2^64. If the message has no other value, the number travels without its name.
    _NUMBER: ClassVar[str] = ""

    def to_bytes(self) -> bytes:
        """Return the message. In JSON, default values do not travel."""
        values = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        payload: bytes = values.pop("payload", b"")
        if self._NUMBER and values.keys() <= {self._NUMBER}:
            number: int = getattr(self, self._NUMBER)
            return b"\n" + number.to_bytes(8) + payload
        return json.dumps(values).encode() + b"\n" + payload

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a message."""
        values, _, payload = data.partition(b"\n")
        if values:
            return cls(**json.loads(values), payload=payload)
        return cls(**{cls._NUMBER: int.from_bytes(payload[:8])}, payload=payload[8:])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Message):
    """What a rank is about to save. The payload is its compressed piece table, if rank 0 does not have the table.

    Args:
        pieces: The table's digest; see `joint_plan.encode`.
        groups: The replicas that this rank compares with other ranks; see `ReplicaDigests.groups`.
    """

    pieces: int = 0
    groups: Groups = ()

    _NUMBER: ClassVar[str] = "pieces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening(Message):
    """Rank 0's answer to all offers: the ranks may write, unless a value says otherwise.

    Args:
        iteration: The iteration that rank 0 saves.
        sides: The ranks with different replicas, which all ranks are about to learn; see `require_agreement`.
        is_decided: Whether the attempt is decided already.
    """

    iteration: int = 0
    sides: Sequence[Sequence[int]] = ()
    is_decided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport(Message):
    """What a rank has written. The payload is the digests for all blocks in its pieces, in table order.

    Args:
        written_bytes: Bytes written by this rank, without headers. Ranks on a host write for each other, so only the
            sum over all ranks equals the pieces' bytes.
    """

    written_bytes: int = 0

    _NUMBER: ClassVar[str] = "written_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMessage(Message):
    """Rank 0's decision on an attempt. The payload is the order for copying local checkpoints.

    Args:
        iteration: The checkpoint's iteration. None without a checkpoint.
    """

    iteration: int | None = None


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


def first_problem(messages: Mapping[int, Message]) -> str | None:
    """Return the first failed rank's problem with the rank's number, given the messages by rank. None without one."""
    problems = (f"Rank {rank}: {each.problem}" for rank, each in messages.items() if each.problem is not None)
    return next(problems, None)


def sides_of(answers: Mapping[int, object]) -> list[list[int]]:
    """Group ascending ranks by equal answers, the lowest rank's side first."""
    sides = defaultdict[object, list[int]](list)
    for rank in sorted(answers):
        sides[answers[rank]].append(rank)
    return list(sides.values())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words, numbering at most the first eight."""
    return f"rank{'s' * (len(ranks) > 1)} {first_of(ranks, 8)}"
