"""Proves, after a load or between iterations, the equal bits of ranks with the same box."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence

import xxhash

from reprise.commit.channel import StoreChannel
from reprise.commit.disagreement import replica_error
from reprise.commit.inventory import digest_of_ranks
from reprise.errors import ReplicaError
from reprise.tensors.live import LiveTensor
from reprise.tensors.memory import memory_of

_DIGEST = struct.Struct("<Q")
_ROW = struct.Struct("<QQ")  # digest of the group's ranks, digest of all its tensors

Group = tuple[int, ...]


def check_replicas(live: Sequence[LiveTensor], channel: StoreChannel, key: str) -> None:
    """Compare the digests of all replicated boxes. A call of all ranks.

    Each rank sends a digest per group of replicas, and the digests of every tensor only where two disagree.

    Raises:
        ReplicaError: on rank 0, naming the first different tensor and the ranks; a CheckpointError on the others.
    """
    if channel.world_size == 1:
        return
    groups = _digests(live)
    report = b"".join(
        _ROW.pack(digest_of_ranks(group), xxhash.xxh3_64_intdigest(b"".join(digests.values())))
        for group, digests in groups.items()
    )
    difference = _first_difference(channel.gather(f"{key}/groups", report))
    odd_group = channel.broadcast(f"{key}/odd", difference)
    if not odd_group:
        return
    tensors_of_group = [
        tensors for group, tensors in groups.items() if _DIGEST.pack(digest_of_ranks(group)) == odd_group
    ]
    details = channel.gather(
        f"{key}/tensors", b"".join(digest for tensors in tensors_of_group for digest in tensors.values())
    )
    problem: ReplicaError | None = None
    if channel.coordinates:
        by_rank = sorted(zip(channel.ranks, details, strict=True))
        problem = _describe([(rank, data) for rank, data in by_rank if data], live, odd_group)
    channel.agree(f"{key}/differs", problem)


def _digests(live: Sequence[LiveTensor]) -> dict[Group, dict[str, bytes]]:
    """Return the digest of every replicated tensor, by its ranks."""
    groups: dict[Group, dict[str, bytes]] = defaultdict(dict)
    for tensor in live:
        if len(tensor.replicas) > 1:
            digest = xxhash.xxh3_64_intdigest(memory_of(tensor.local))
            groups[tensor.replicas][tensor.spec.name] = _DIGEST.pack(digest)
    return groups


def _first_difference(reports: Sequence[bytes]) -> bytes:
    """Return the digest of the first group whose members disagree, or nothing. Rank 0 only."""
    digests: dict[int, int] = {}
    for report in reports:
        for group, digest in _ROW.iter_unpack(report):
            if digests.setdefault(group, digest) != digest:
                return _DIGEST.pack(group)
    return b""


def _describe(details: Sequence[tuple[int, bytes]], live: Sequence[LiveTensor], odd_group: bytes) -> ReplicaError:
    """Return the error with the differing ranks and, if this rank knows its name, the first tensor."""
    (first_rank, first), *further = details
    names = [t.spec.name for t in live if _DIGEST.pack(digest_of_ranks(t.replicas)) == odd_group]
    for rank, data in further:
        for number in range(max(len(first), len(data)) // _DIGEST.size):
            at = slice(number * _DIGEST.size, (number + 1) * _DIGEST.size)
            if first[at] != data[at]:
                name = names[number] if number < len(names) else f"tensor {number} of the group"
                break
        else:
            continue
        return replica_error(f"other bits of {name} on ranks {first_rank} and {rank}")
    return replica_error(f"other bits on ranks {[rank for rank, _ in details]}")
