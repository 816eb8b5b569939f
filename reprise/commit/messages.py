"""An attempt's messages, and the groups into which equal answers divide the ranks."""

from __future__ import annotations

import io
import json
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from reprise.errors import CheckpointError, first_of

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

    # The bytes of each number, if the message is frequent: one that has numbers alone travels without names.
    _NUMBERS: ClassVar[Mapping[str, int]] = {}

    def to_bytes(self) -> bytes:
        """Return the message. In JSON, default values do not travel."""
        values = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        payload: bytes = values.pop("payload", b"")
        if self._NUMBERS and values.keys() <= self._NUMBERS.keys():
            numbers = (getattr(self, name).to_bytes(size, "big") for name, size in self._NUMBERS.items())
            return b"\n" + b"".join(numbers) + payload
        return json.dumps(values).encode() + b"\n" + payload

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a message."""
        values, _, payload = data.partition(b"\n")
        if values:
            return cls(**json.loads(values), payload=payload)
        numbers = dict[str, int]()
        for name, size in cls._NUMBERS.items():
            numbers[name], payload = int.from_bytes(payload[:size], "big"), payload[size:]
        return cls(**numbers, payload=payload)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Message):
    """What a rank is about to save. The payload is its compressed piece table, if rank 0 does not have the table.

    Args:
        pieces: The table's digest; see `joint_plan.encode`.
        groups: The replicas that this rank compares with other ranks; see `ReplicaDigests.groups`.
    """

    iteration: int = 0
    pieces: int = 0
    groups: Groups = ()

    _NUMBERS: ClassVar[Mapping[str, int]] = {"iteration": 6, "pieces": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening(Message):
    """Rank 0's answer to all offers: the ranks may write, unless a value says otherwise.

    Args:
        sides: The ranks with different replicas, which all ranks are about to learn; see `require_agreement`.
        is_decided: Whether the attempt is decided already.
    """

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

    _NUMBERS: ClassVar[Mapping[str, int]] = {"written_bytes": 8}


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
    return f"rank{'s' * (len(ranks) > 1)} {first_of(ranks, 8)}"
