"""Proves that replicas of a box hold the same bits: at a save and after a load."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import xxhash

from reprise.commit.messages import Groups, ranks_text, sides_of
from reprise.errors import ReplicaError, TrainerError, first_of
from reprise.format.box import whole
from reprise.ranks.channel import StoreChannel
from reprise.storage.worker import run_together
from reprise.tensors.live import LiveTensor

# A device sums block by block, because a sum needs four times its block's memory. An even number.
_BLOCK_BYTES = 16 << 20
# The bytes that justify starting another thread.
_THREAD_BYTES = 4 << 20


class ReplicaDigests:
    """Digests of a rank's replicated boxes, as their bits are when this object is made.

    The constructor digests host memory on several threads. A device sums its memory in stream order, and nothing waits
    for it before `digests`.

    Args:
        live: This rank's tensors.
    """

    def __init__(self, live: Sequence[LiveTensor]) -> None:
        self._groups = defaultdict[tuple[int, ...], list[str]](list)
        self._digests = dict[str, int]()
        self._sums, self._copy, sums = list[str](), torch.empty(0, device="cpu"), list[torch.Tensor]()
        on_host = list[tuple[str, torch.Tensor]]()
        for tensor in live:
            if len(tensor.replicas) < 2 or not tensor.local.numel():
                continue
            name = _name_of(tensor)
            self._groups[tensor.replicas].append(name)
            data = tensor.local.detach().contiguous().reshape(-1).view(torch.uint8)
            if data.device.type == "cpu":
                on_host.append((name, data))
            else:
                self._sums.append(name)
                sums.append(checksum(data))
        threads = 1 + sum(data.numel() for _, data in on_host) // _THREAD_BYTES
        calls = [partial(self._digest, name, data) for name, data in on_host]
        run_together(calls, name="checkpoint-replicas", threads=min(threads, torch.get_num_threads()))
        self._event: torch.Event | None = None
        if sums:  # on their way to the host
            device = sums[0].device
            self._copy = torch.empty(len(sums), dtype=torch.int64, device="cpu", pin_memory=True)
            self._copy.copy_(torch.stack(sums), non_blocking=True)
            self._event = torch.get_device_module(device).current_stream(device).record_event()

    def digests(self) -> dict[str, int]:
        """Wait for the device, and return each box's digest, in the order of rank sets and tensors. Any thread."""
        if self._event is not None:
            self._event.synchronize()
        digests = self._digests | dict(zip(self._sums, self._copy.tolist(), strict=True))  # in the threads' order
        return {name: digests[name] for names in self._groups.values() for name in names}

    def groups(self) -> Groups:
        """Return every rank set's digest, each with the digest of everything the set shares."""
        digests = self.digests()
        shared = [(ranks, sorted((name, digests[name]) for name in names)) for ranks, names in self._groups.items()]
        return [[xxhash.xxh3_64_intdigest(repr(part).encode()) for part in pair] for pair in shared]

    def table(self) -> bytes:
        """Return every box's digest as a message, which is sent only if two ranks disagree."""
        return json.dumps(self.digests()).encode()

    def _digest(self, name: str, data: torch.Tensor) -> None:
        self._digests[name] = xxhash.xxh3_64_intdigest(memoryview(data.numpy()))  # type: ignore[arg-type]


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Return the sum of all words times odd numbers, modulo 2^64, as a 0-d int64 tensor on the data's device.

    Words are 4 bytes, or 1 byte in a last block whose size is not a multiple of 4. Changing a single word always
    changes the sum, since an odd number has an inverse modulo 2^64. The sum depends on neither addition order nor
    address, which may differ between ranks.

    Args:
        data: Bytes, shape `[n]`, at least one.
    """
    sums = []
    for start in range(0, data.numel(), _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        block = block.clone() if block.data_ptr() % 4 else block
        words = (block.view(torch.int32) if block.numel() % 4 == 0 else block).to(torch.int64)
        sums.append((words * torch.arange(start + 1, start + 2 * words.numel(), 2, device=data.device)).sum())
    return torch.stack(sums).sum()


def _name_of(tensor: LiveTensor) -> str:
    """Return a live tensor's name and, unless it is a whole tensor, its box."""
    box = tensor.box
    is_whole = box == whole(tensor.spec.view)
    return tensor.spec.name + ("" if is_whole else f" (the box at {list(box.offset)} of {list(box.shape)})")


def check_replicas(
    live: Sequence[LiveTensor], channel: StoreChannel, key: str, *, problem: TrainerError | None = None
) -> None:
    """Compare all replicated boxes' digests, unless a rank has a problem. All ranks call it.

    Each rank sends a digest per replica group. Two disagreeing ranks send a digest per tensor.

    Args:
        problem: This rank's problem with its tensors.

    Raises:
        TrainerError: A rank has a problem; see `StoreChannel.agree`.
        ReplicaError: Names the first different tensors and the ranks. Raised on rank 0; the others raise a
            CheckpointError.
    """
    replicas = ReplicaDigests(live if problem is None else ())
    sides = channel.join(
        key,
        replicas.groups(),
        lambda groups: differing_sides(dict(zip(channel.ranks, groups, strict=True))),
        problem=problem,
    )
    if sides:
        raise_difference(channel, key, sides, replicas)


def differing_sides(groups_by_rank: Mapping[int, Groups]) -> list[list[int]]:
    """Return the first disagreeing group's ranks by side, or an empty list."""
    digests = defaultdict[int, dict[int, int]](dict)
    for rank, groups in groups_by_rank.items():
        for group, digest in groups:
            digests[group][rank] = digest
    return next((sides for sides in map(sides_of, digests.values()) if len(sides) > 1), [])


def raise_difference(
    channel: StoreChannel, key: str, sides: Sequence[Sequence[int]], replicas: ReplicaDigests | None
) -> None:
    """Raise the difference between these sides on every rank. A rank from each of the first two explains it.

    Args:
        sides: The result of `differing_sides`, the same on all ranks, not empty.
        replicas: This rank's digests. None if it has none to compare.

    Raises:
        ReplicaError: Names the first different tensors and the ranks. Raised on rank 0; the others raise a
            CheckpointError.
    """
    witnesses = [side[0] for side in sides[:2]]
    table = b"" if replicas is None or channel.rank not in witnesses else replicas.table()
    tables = dict(zip(channel.ranks, channel.gather(f"{key}/tables", table), strict=False))

    def explain() -> None:
        raise _difference(sides, *(json.loads(tables[rank]) for rank in witnesses))

    channel.from_first(f"{key}/differs", explain)


def _difference(sides: Sequence[Sequence[int]], first: Mapping[str, int], second: Mapping[str, int]) -> ReplicaError:
    """Return the error naming the ranks and the first different boxes, given the first two sides' tables."""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return ReplicaError(
        "Replicas of the same tensor hold different bits",
        expected="the same bits on all ranks that hold a tensor",
        found=f"{first_of(names, 3, '; ')}; {' against '.join(map(ranks_text, sides))}",
        fix="Committed checkpoints are untouched: resume from the newest. If it happens again, the memory of one of "
        "these hosts cannot be trusted, or the program's replicas drift apart.",
    )
