"""The ranks taking part in a save or load: a process group, or this process alone."""

from __future__ import annotations

import math
from functools import partial

import torch.distributed as dist
import xxhash
from torch.distributed.distributed_c10d import Store

from reprise.errors import ConfigError
from reprise.ranks.channel import StoreChannel, single_rank_channel
from reprise.ranks.joint_call import JointCall
from reprise.torch_private import _get_default_store

# How long ranks in a call wait for a rank that is late: one with a long evaluation, say.
CALL_TIMEOUT_S = 120.0
COMMIT_TIMEOUT_S = 1800.0


def open_call(
    name: str,
    *,
    timeout_s: float = CALL_TIMEOUT_S,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
) -> JointCall:
    """Return a joint call by a process group as a context, with its own channel.

    Messages lie in the default store under the group's and the call's prefix, so other ranks take no part.

    Args:
        name: The call as the user wrote it, with everything that must be equal on all ranks.
        timeout_s: Seconds to wait for absent ranks.
        process_group: The calling group. None means all ranks.
        coordinator_rank: The deciding global rank, which takes the lock, names the attempt and renames.

    Raises:
        ConfigError: This rank or, on entry, the coordinator is outside the group, or `timeout_s` is not a number.
        CheckpointError: On entry: the ranks make different calls, or name several coordinators.
    """
    check = partial(check_seconds, "timeout_s", timeout_s, may_be_zero=True)
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None or coordinator_rank != 0:
            raise ConfigError(
                "The process group is not initialized", fix="Call torch.distributed.init_process_group first."
            )
        return JointCall(single_rank_channel(), "call", name, timeout_s=timeout_s, check=check)
    rank, ranks = dist.get_rank(), _members(process_group)
    store: Store = _get_default_store()  # torch has no public name for it
    is_all = len(ranks) == dist.get_world_size()
    group = "reprise" if is_all else f"reprise/{xxhash.xxh3_64_hexdigest(repr(ranks).encode())}"
    count = int(store.add(f"{group}/calls/{rank}", 1))  # before any check, because calls match by number
    first = coordinator_rank if coordinator_rank in ranks else ranks[0]
    channel = StoreChannel(
        store,
        rank,
        world_size=len(ranks),
        timeout_s=COMMIT_TIMEOUT_S,
        ranks=(first, *(member for member in ranks if member != first)),
        prefix=f"{group}/{count}",
    )

    def check_all() -> None:
        check()
        _require_coordinator(coordinator_rank, ranks)

    coordinator = "" if coordinator_rank == 0 else f" with coordinator_rank={coordinator_rank}"
    return JointCall(channel, "call", f"{name}{coordinator}", timeout_s=timeout_s, check=check_all)


def check_seconds(name: str, limit: object, *, may_be_zero: bool = False) -> None:
    """Require a finite number of seconds.

    Raises:
        ConfigError: Names it.
    """
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool) and 0 <= limit < math.inf
    if not is_number or (limit == 0 and not may_be_zero):
        raise ConfigError(
            f"{name} is invalid",
            expected="a finite number of seconds, 0 or more" if may_be_zero else "a finite number of seconds above 0",
            found=repr(limit),
        )


def _require_coordinator(coordinator_rank: int, ranks: tuple[int, ...]) -> None:
    """Refuse a coordinator outside the group."""
    if coordinator_rank not in ranks:
        raise ConfigError(
            "The coordinator is not in the process group",
            expected=f"one of its ranks: {', '.join(map(str, ranks))}",
            found=f"coordinator_rank={coordinator_rank}",
            fix=f"Set coordinator_rank={ranks[0]}. Ranks are global, not numbered within the group.",
        )


def _members(process_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return a group's global ranks in ascending order."""
    if process_group is None:
        return tuple(range(dist.get_world_size()))
    if not isinstance(process_group, dist.ProcessGroup):  # `new_group` returns this to ranks outside the group
        raise ConfigError(
            "This rank is not in the process group",
            where=f"rank {dist.get_rank()}",
            fix="Call this only on the members of the group.",
        )
    return tuple(sorted(dist.get_process_group_ranks(process_group)))
