"""The ranks that save or load together: a process group of the program, or this process alone."""

from __future__ import annotations

import secrets

import torch.distributed as dist
import xxhash
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainer.checkpoint.commit.channel import StoreChannel, single_rank_channel
from trainer.errors import ConfigError

COMMIT_TIMEOUT_S = 1800.0


def open_channel(
    process_group: dist.ProcessGroup | None = None, *, coordinator_rank: int = 0
) -> tuple[StoreChannel, str]:
    """Return a channel between the ranks of a group, and a nonce that they share. A call of all its ranks.

    The messages of a group lie in the default store under a prefix of its own, so ranks outside take no part.

    Args:
        process_group: None for all ranks of the program.
        coordinator_rank: the global rank that decides: it takes the lock, names the attempt and renames.

    Raises:
        ConfigError: if this rank or the coordinator is not in the group, or the ranks name several coordinators.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None or coordinator_rank != 0:
            raise ConfigError("There is no process group", fix="Call torch.distributed.init_process_group first.")
        return single_rank_channel(), secrets.token_hex(4)
    rank, ranks = dist.get_rank(), _members(process_group)
    store: Store = distributed_c10d._get_default_store()  # torch has no public name for it
    is_all = len(ranks) == dist.get_world_size()
    name = "reprise" if is_all else f"reprise/{xxhash.xxh3_64_hexdigest(repr(ranks).encode())}"
    count = int(store.add(f"{name}/calls/{rank}", 1))  # before any check, as calls are matched by their number
    store = PrefixStore(f"{name}/{count}", store)
    first = coordinator_rank if coordinator_rank in ranks else ranks[0]
    ordered = (first, *(other for other in ranks if other != first))
    channel = StoreChannel(store, rank, world_size=len(ranks), timeout_s=COMMIT_TIMEOUT_S, ranks=ordered)
    try:
        _require_coordinator(store, coordinator_rank, rank, ranks)
    except ConfigError as error:
        channel.fail(str(error))
        raise
    nonce = secrets.token_hex(4).encode() if channel.coordinates else None
    return channel, channel.broadcast("nonce", nonce).decode()


def _require_coordinator(store: Store, coordinator_rank: int, rank: int, ranks: tuple[int, ...]) -> None:
    """Refuse a coordinator outside the group, or another one than that of another rank."""
    if coordinator_rank not in ranks:
        raise ConfigError(
            "The coordinator is not in the process group",
            expected=f"one of its ranks: {', '.join(map(str, ranks))}",
            found=f"coordinator_rank={coordinator_rank}",
            fix=f"Set coordinator_rank={ranks[0]}; the numbers are those of the whole program.",
        )
    agreed = bytes(store.compare_set("coordinator", "", str(coordinator_rank))).decode()
    if agreed != str(coordinator_rank):
        raise ConfigError(
            "The ranks of a group name several coordinators",
            expected=f"coordinator_rank={agreed}, as another rank",
            found=f"coordinator_rank={coordinator_rank} on rank {rank}",
        )


def _members(process_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of a group in ascending order."""
    if process_group is None:
        return tuple(range(dist.get_world_size()))
    if not isinstance(process_group, dist.ProcessGroup):  # as `new_group` returns it to ranks outside
        raise ConfigError(
            "This rank is not in the process group",
            where=f"rank {dist.get_rank()}",
            fix="Call this on the members of the group alone; the others are not needed.",
        )
    return tuple(sorted(dist.get_process_group_ranks(process_group)))
