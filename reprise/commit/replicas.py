"""Proves that the ranks which hold the same box hold the same bits: at a save, after a load, and between iterations."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
import xxhash

from reprise.commit import disagreement
from reprise.commit.disagreement import Disagreement
from reprise.commit.inventory import Inventory, SharedDigests
from reprise.commit.report import GroupDigest
from reprise.errors import TrainerError
from reprise.ranks.channel import StoreChannel
from reprise.storage.worker import run_together
from reprise.tensors.live import LiveTensor

# A device sums a block at a time, as the sum needs four times the memory of its block.
_BLOCK_BYTES = 16 << 20
# Bytes for which another thread is worth its start.
_THREAD_BYTES = 4 << 20


class ReplicaDigests:
    """The digests of a rank's replicated boxes, with the bits of the moment at which this object is made.

    Host memory is digested by this call, on several threads. A device sums its memory in the order of its stream, and
    nothing waits for it before `by_ranks`.

    Args:
        live: the tensors of this rank.
    """

    def __init__(self, live: Sequence[LiveTensor]) -> None:
        self._groups = defaultdict[tuple[int, ...], list[str]](list)
        self._digests = dict[str, bytes]()
        self._sums = dict[str, torch.Tensor]()
        on_host = list[tuple[str, torch.Tensor]]()
        for tensor in live:
            if len(tensor.replicas) < 2 or not tensor.local.numel():
                continue
            self._groups[tensor.replicas].append(tensor.spec.name)
            data = tensor.local.detach().contiguous().reshape(-1).view(torch.uint8)
            if data.device.type == "cpu":
                on_host.append((tensor.spec.name, data))
            else:
                self._sums[tensor.spec.name] = torch.stack(
                    [checksum(block) for block in torch.split(data, _BLOCK_BYTES)]
                )
        threads = 1 + sum(data.numel() for _, data in on_host) // _THREAD_BYTES
        calls = [partial(self._digest, name, data) for name, data in on_host]
        run_together(calls, name="checkpoint-replicas", threads=min(threads, torch.get_num_threads()))
        self._event: torch.Event | None = None
        if self._sums:
            self._copy_to_host()

    def by_ranks(self) -> SharedDigests:
        """Wait for the device, and return the digests by set of ranks, then by tensor. Any thread."""
        if self._event is not None:
            self._event.synchronize()
        sums = {name: struct.pack(f"<{len(sums)}q", *sums.tolist()) for name, sums in self._sums.items()}
        digests = self._digests | sums
        return {ranks: {name: digests[name] for name in names} for ranks, names in self._groups.items()}

    def _digest(self, name: str, data: torch.Tensor) -> None:
        self._digests[name] = xxhash.xxh3_64_digest(memoryview(data.numpy()))  # type: ignore[arg-type]

    def _copy_to_host(self) -> None:
        """Start the copy of the sums from the device."""
        sums = torch.cat(list(self._sums.values()))
        counts = [len(sums_of_tensor) for sums_of_tensor in self._sums.values()]
        copy = torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True)
        copy.copy_(sums, non_blocking=True)
        self._event = torch.get_device_module(sums.device).current_stream(sums.device).record_event()
        self._sums = dict(zip(self._sums, torch.split(copy, counts), strict=True))


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Return the sum over i of (2 i + 1) * word i, modulo 2^64, as a 0-d int64 tensor on the device of the data.

    Words are 4 bytes, or 1 byte where the size is not a multiple of 4. A change of a single word always changes the
    sum, since an odd number has an inverse modulo 2^64. The sum depends on neither the order of addition nor the
    address, which may differ between ranks.

    Args:
        data: bytes, of shape `[n]`.
    """
    if data.data_ptr() % 4:
        data = data.clone()
    words = (data.view(torch.int32) if data.numel() % 4 == 0 else data).to(torch.int64)
    return (words * torch.arange(1, 2 * words.numel(), 2, device=data.device)).sum()


def check_replicas(live: Sequence[LiveTensor], channel: StoreChannel, key: str) -> None:
    """Compare the digests of all replicated boxes. A call of all ranks.

    Each rank sends a digest per group of replicas. Two ranks that disagree send the digests of every tensor.

    Raises:
        ReplicaError: on rank 0, naming the first different tensors and the ranks; a CheckpointError on the others.
    """
    if channel.world_size == 1:
        return
    inventory = Inventory(live, ReplicaDigests(live).by_ranks())
    rows = channel.gather(f"{key}/groups", b"".join(group.to_bytes() for group in inventory.groups()))
    difference: Disagreement | None = None

    def find() -> Sequence[int]:
        nonlocal difference
        groups = {rank: GroupDigest.all_of(data) for rank, data in zip(channel.ranks, rows, strict=True)}
        difference = disagreement.between_groups(dict(sorted(groups.items())))
        return () if difference is None else difference.witnesses

    witnesses = channel.from_first(f"{key}/witnesses", find)
    if not witnesses:
        return
    tables = channel.gather(f"{key}/tables", inventory.to_bytes() if channel.rank in witnesses else b"")
    problem: TrainerError | None = None
    if difference is not None:
        by_rank = dict(zip(channel.ranks, tables, strict=True))
        problem = disagreement.explain(difference, [by_rank[rank] for rank in witnesses])
    channel.agree(f"{key}/differs", problem)
